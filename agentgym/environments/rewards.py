"""Reward methods: their decorator, their weights, and how they are called."""

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
    """Make a method a reward: it scores the finished rollout, whose reward is the weighted sum of all reward methods.

    The method is async or plain and returns a finite number. A plain one runs in a separate thread and never blocks the
    event loop. Its value is logged under its name, without the weight.

    Args:
        function: The method, if the decorator is used without arguments.
        weight: The weight in the sum; 0.0 only logs the value.
        role: The role to whose reward the value is added, instead of to the rollout's; sub-agents with that role are
            trained on it.

    Raises:
        ValueError: If the weight isn't a finite number.
        TypeError: If the decorator is applied to anything but a function.
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
    """Return the weighted sum of a class's scores, without those of roles.

    A score that isn't from a reward method counts once.
    """
    return _sum(owner, scores, "")


def role_totals(owner: type, scores: Mapping[str, float]) -> dict[str, float]:
    """Return the weighted sum of scores for each role that has reward methods."""
    roles = dict.fromkeys(mark.role for mark in _marks(owner).values() if mark.role)
    return {role: _sum(owner, scores, role) for role in roles}


def _sum(owner: type, scores: Mapping[str, float], role: str) -> float:
    marks, unmarked = _marks(owner), _RewardMark(1.0)
    of = [(marks.get(name, unmarked), value) for name, value in scores.items()]
    return sum(mark.weight * value for mark, value in of if mark.role == role)


async def reward_value(method: Callable[..., Any], where: str, threads: Threads) -> float:
    """Call a reward method and return its value as a float.

    A plain method runs in a separate thread, which is interrupted if the caller stops waiting.

    Args:
        method: The bound method.
        where: How error messages name the reward.
        threads: The rollout's threads.

    Raises:
        EnvError: If the method raised, in which case the message has the line, or if it didn't return a number.
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
"""Start of the reason that is recorded if a reward is 0.0 because of something that the policy wrote or left behind."""


def counted_content(error: BaseException, where: str, method: Callable[..., Any]) -> str:
    """Record an error that the policy's text or files caused, and return the name of the metric that counts it.

    The error is logged once. The reward or method that `where` names is added to the rollout's `failed_cases`. The
    caller doesn't let the rollout fail; a reward is 0.0 instead. For any other error, only "" is returned.
    """
    content = content_error(error)
    if content is None:
        return ""
    place = place_of(content) or place_of_function(method)
    note_failed(where.partition(": ")[2] or where, f"{ZERO}{describe(content)}, at {place}")
    log_once(f"{where}, which is therefore 0.0 ({content.counted} counts this),", content, method)
    return content.counted


def _number(value: Any, where: str) -> float:
    """Return the value as a float; reject text and arrays, although Python could convert some of them."""
    if not isinstance(value, str | bytes) and not getattr(value, "ndim", 0):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise EnvError(f"{where} returned {shown(value)} ({type(value).__name__}): return a number")
