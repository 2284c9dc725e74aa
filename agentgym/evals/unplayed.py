"""Creates instances of an env without running it. Reading an attribute that only a run sets raises an error."""

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from agentgym.environments.env import Env
from agentgym.environments.parameters import variant
from agentgym.environments.rewards import rewards_of
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EnvError
from agentgym.types.rollout import Rollout, StopReason, Turn

CUT = (StopReason.LENGTH, StopReason.CONTEXT, StopReason.TOKENS)
"""The stop reasons of a rollout whose last turn a token limit may have cut off."""

GIVEN = frozenset(
    {"task", "metrics", "role_rewards", "answer", "_models", "_forks", "_resources", "_threads", "_sandbox"}
)
"""The attributes that are set without running the env, or that agentgym's own methods provide."""


class UnplayedError(EnvError):
    """A reward reads an attribute that is only set while the env runs."""


def unplayed(env: type[Env[Any]], task: Any, rollout: Rollout) -> Env[Any]:
    """Return an instance in its state at the end of the rollout, as far as that is known without running the env.

    If the env defines `restore_played`, which restores the rest, all attributes can be read. Otherwise, reading the
    sandbox, or an attribute that the env's own code assigns, raises UnplayedError. `reads_of` also returns this error,
    in case the env's code swallows it.
    """
    restores = env.restore_played is not Env.restore_played
    cls: type = env
    made: Env[Any] = (cls if restores else _watched(cls))(task)
    made.metrics |= dict(rollout.metrics)
    made.role_rewards |= dict(rollout.role_rewards)
    if isinstance(made, ToolEnv):
        last, takes_cut = _last_turn(rollout), env.step_cut is ToolEnv.step_cut
        is_cut = rollout.stop_reason in CUT and last is not None and last.finish_reason == "length"
        if last is not None and (rollout.stop_reason == StopReason.ANSWER or (is_cut and takes_cut)):
            made.answer = str(last.message["content"])
    if not restores:
        own = {name for name in vars(made) if name not in GIVEN and name != "_extra_tools"}
        made.__dict__["_unplayed"] = own | _assigned(env) | {"sandbox"}
        made.__dict__["_reads"] = []
    made.restore_played(rollout)
    return made


def reads_of(made: Env[Any]) -> UnplayedError | None:
    """Return the first UnplayedError that reading an attribute raised, even if the env's code has caught it."""
    return next(iter(made.__dict__.get("_reads", ())), None)


def _last_turn(rollout: Rollout) -> Turn | None:
    """Return the last turn of the first conversation; None if nothing was sampled in its last segment."""
    segment = rollout.segments[0]
    while following := [
        s for s in rollout.segments if s.parent == segment.index and s.kind in ("compaction", "rerender")
    ]:
        segment = following[0]
    return segment.turns[-1] if segment.turns else None


@cache
def _watched(env: Any) -> Any:
    """Return a subclass of the env whose instances raise UnplayedError if an attribute in their `_unplayed` is read.

    Once such an attribute is assigned, it can be read.
    """

    def read(self: Any, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__").get("_unplayed", ()):
            self.__dict__["_reads"].append(error := _refused(env, name))
            raise error
        return env.__getattribute__(self, name)

    def assign(self: Any, name: str, value: Any) -> None:
        self.__dict__.get("_unplayed", set()).discard(name)
        env.__setattr__(self, name, value)

    return variant(env, {"__getattribute__": read, "__setattr__": assign})


def _refused(env: type[Env[Any]], name: str) -> UnplayedError:
    owner: type = env
    asking = _asking(set(rewards_of(owner)))
    what = f"{env.__name__}: {f'reward {asking!r}' if asking else 'its score'} reads self.{name}"
    if name == "sandbox":
        return UnplayedError(
            f"{what}, but a rollout's sandbox is gone after the rollout; run the tasks again with agentgym eval"
        )
    return UnplayedError(
        f"{what}, which is only set while the env runs; define `def restore_played(self, rollout)` in the env to set "
        "it from the rollout's messages, or run the tasks again with agentgym eval"
    )


def _asking(names: set[str]) -> str | None:
    """Return which of the reward methods in `names` is running, from the call stack; None if none is."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in names:
            return frame.f_code.co_name
    return None


def _assigned(env: type[Env[Any]]) -> set[str]:
    """Return the names of attributes that the env's own code assigns, in `setup`, in tools or anywhere else."""
    own = [owner for owner in env.__mro__ if owner not in (Env, ToolEnv, object) and issubclass(owner, Env)]
    functions = [found for owner in own for value in vars(owner).values() for found in _functions(value)]
    return {name for function in functions for name in _stored(function.__code__)} - (GIVEN - {"answer"})


def _functions(value: Any) -> Iterator[Any]:
    inner = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
    for each in inner:
        if inspect.isfunction(found := inspect.unwrap(each) if callable(each) else None):
            yield found


def _stored(code: CodeType) -> Iterator[str]:
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _stored(inner)
