"""Copies of environments in the middle of a rollout."""

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from types import FunctionType
from typing import Any, TypeVar

from agentgym.errors import EnvError

EnvT = TypeVar("EnvT")


def copied(env: EnvT, memo: dict[int, Any]) -> EnvT:
    """Return a copy of an env that shares only what `memo` says, and what cannot change.

    `memo` is that of `copy.deepcopy`: by the id of an object it has what stands in its place, such as the branch of the
    sandbox for the sandbox. EnvError names an attribute that cannot be copied, and says what to write.
    """
    twin = copy(env)
    memo[id(env)] = twin
    slots = (name for cls in type(env).__mro__ for name in _listed(vars(cls).get("__slots__", ())))
    own = [name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(env, name)]
    for name in [*vars(env), *own]:
        value = getattr(env, name)
        if (why := _why_not(value, env, memo)) is not None:
            raise _refused(env, name, why)
        try:
            setattr(twin, name, deepcopy(value, memo))
        except Exception as error:
            raise _refused(env, name, str(error)) from error
    return twin


def _listed(slots: str | Sequence[str]) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else slots


def _why_not(value: Any, env: object, memo: dict[int, Any]) -> str | None:
    """Say why `deepcopy` would give a copy that still reaches what the env has; None where it does not, at a glance."""
    for each in _inner(value):
        if id(each) in memo or hasattr(each, "__deepcopy__"):
            continue
        if isinstance(each, FunctionType) and _keeps(each, env):
            return f"the function {each.__qualname__} was made with this instance in it, and would go on with it"
        if hasattr(type(each), "__aexit__") or hasattr(type(each), "__exit__"):
            return f"a {type(each).__name__} is open, and two would use and close it"
    return None


def _inner(value: Any) -> Iterator[Any]:
    """Yield the value, or what is in a list or a dict of values, with what the tools among them call."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    for each in inner:
        yield each
        yield getattr(each, "call", None)


def _keeps(function: FunctionType, env: object) -> bool:
    """Whether the env, or a method of it, is in the closure of a function: `deepcopy` shares functions."""
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # It is empty.
            continue
        if held is env or getattr(held, "__self__", None) is env:
            return True
    return False


def _refused(env: object, name: str, why: str) -> EnvError:
    cls = type(env).__name__
    return EnvError(
        f"{cls}.branch: self.{name} ({type(getattr(env, name)).__name__}) cannot be copied: {why}; override "
        f"`async def branch(self, memo)` in {cls}: make `twin = copy.copy(self)`, give it its own parts, such as "
        f"`twin.board = copy.deepcopy(self.board, memo)`, and a `{name}` of its own or one to share, and return it"
    )
