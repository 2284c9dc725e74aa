"""Reward methods: their decorator, their weights, and the call of one."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, overload

from agentgym.config_fields import names_its_arguments
from agentgym.errors import AgentGymError, EnvError, alone, content_error, must_pass, of_machine
from agentgym.errors.tracebacks import describe, log_once, place_of, place_of_function
from agentgym.sandboxes.protocol.arguments import shown
from agentgym.sandboxes.protocol.verdicts import note_failed
from agentgym.tools.declarations import check_number, check_target, marked
from agentgym.tools.tool_threads import Threads, call_method

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _RewardMark:
    weight: float
    role: str = ""


@overload
def reward(function: F) -> F: ...


@overload
def reward(*, weight: float = ..., role: str = ...) -> Callable[[F], F]: ...


@names_its_arguments
def reward(function: Callable[..., Any] | None = None, *, weight: float = 1.0, role: str = "") -> Callable[..., Any]:
    """Make a method a reward: it scores the finished rollout, whose reward is the weighted sum of all of them.

    What it returns is logged under its name, without the weight; `weight=0.0` logs it and rewards nothing.
    With a `role` it is part of that role's reward instead, on which the sub-agents of the role are trained.
    The method is async or plain and returns a finite number. A plain one runs in a thread of its own and never blocks
    the event loop.
    """
    check_number("weight", weight)

    def mark(target: F) -> F:
        check_target(target, "@ag.reward", "write `@ag.reward`, or `@ag.reward(weight=0.5)`")
        target.__agentgym_reward__ = _RewardMark(weight, role)  # type: ignore[attr-defined]
        return target

    return mark(function) if function is not None else mark


@cache
def rewards_of(owner: type) -> dict[str, float]:
    """Return the weight of each reward method of a class and its bases, by name."""
    return {name: mark.weight for name, mark in _marks(owner).items()}


@cache
def _marks(owner: type) -> dict[str, _RewardMark]:
    return dict(marked(owner, "__agentgym_reward__", "@ag.reward"))


def total(owner: type, scores: Mapping[str, float]) -> float:
    """Return the sum of the scores of a class, each times its reward's weight, without those of roles.

    A score of no reward method counts once.
    """
    return _sum(owner, scores, "")


def role_totals(owner: type, scores: Mapping[str, float]) -> dict[str, float]:
    """Return the weighted sum of the scores of each role that has reward methods."""
    roles = dict.fromkeys(mark.role for mark in _marks(owner).values() if mark.role)
    return {role: _sum(owner, scores, role) for role in roles}


def _sum(owner: type, scores: Mapping[str, float], role: str) -> float:
    marks, unmarked = _marks(owner), _RewardMark(1.0)
    of = [(marks.get(name, unmarked), value) for name, value in scores.items()]
    return sum(mark.weight * value for mark, value in of if mark.role == role)


async def reward_value(method: Callable[..., Any], where: str, threads: Threads) -> float:
    """Call a reward method and return its value as a float.

    A plain method runs in a thread of its own, which is interrupted when the caller stops waiting.

    :raises EnvError: where the method raised, with the line, or returned no number; `where` names the reward.
    """
    try:
        value = await call_method(method, {}, name=f"agentgym-reward {method.__name__}", threads=threads)
    except (AgentGymError, asyncio.CancelledError):
        raise
    except BaseException as raised:
        error = alone(raised)
        if must_pass(error):
            raise
        if isinstance(error, AgentGymError):
            raise error from error.__cause__
        if (lacking := of_machine(error)) is not None:
            lacking.where = where
            raise lacking from error
        log_once(where, error, method)
        place = place_of(error) or place_of_function(method)
        failed = EnvError(f"{where} raised {describe(error)}, at {place}")
        failed.where = where
        raise failed from error
    return _number(value, where)


ZERO = "it is 0.0: "
"""How the reason of a reward begins that is 0.0 because of what the policy said or left behind."""


def counted_content(error: BaseException, where: str, method: Callable[..., Any]) -> str:
    """Return what counts an error that comes from what the policy said or left behind; "" for any other error.

    It is noted among the failed cases and logged once: what the policy left is scored, and what `where` names is 0.0.
    """
    content = content_error(error)
    if content is None:
        return ""
    place = place_of(content) or place_of_function(method)
    note_failed(where.partition(": ")[2] or where, f"{ZERO}{describe(content)}, at {place}")
    log_once(f"{where}, which is 0.0 for it ({content.counted} counts that),", content, method)
    return content.counted


def _number(value: Any, where: str) -> float:
    """Return the value as a float; text and arrays are refused, although Python could make a float of some."""
    if not isinstance(value, str | bytes) and not getattr(value, "ndim", 0):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise EnvError(f"{where} returned {shown(value)} ({type(value).__name__}): return a number")
