"""Copies of environments in the middle of a rollout."""

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from types import FunctionType
from typing import Any, TypeVar

from agentgym.errors import EnvError

EnvT = TypeVar("EnvT")


def copied(env: EnvT, memo: dict[int, Any]) -> EnvT:
    """Return a copy of an env that shares only immutable values with the env; objects in `memo` are replaced.

    Args:
        env: The env to copy.
        memo: A memo for `copy.deepcopy`: it maps the `id` of an object to the object's replacement in the copy. For
            example, the sandbox is replaced by its branch.

    Raises:
        EnvError: If an attribute can't be copied; the message names it and says what to write.
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
    """Return why a deepcopy would share state with the env, or None if a quick look finds no reason."""
    for each in _inner(value):
        if id(each) in memo or hasattr(each, "__deepcopy__"):
            continue
        if isinstance(each, FunctionType) and _keeps(each, env):
            return f"the function {each.__qualname__} refers to this env in its closure, so a copy of it would, too"
        if hasattr(type(each), "__aexit__") or hasattr(type(each), "__exit__"):
            return f"a {type(each).__name__} may be open, and both the env and its copy would use and close it"
    return None


def _inner(value: Any) -> Iterator[Any]:
    """Yield the value, or the items if it is a list or dict; for each tool among them, also yield its function."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    for each in inner:
        yield each
        yield getattr(each, "call", None)


def _keeps(function: FunctionType, env: object) -> bool:
    """Return whether a function, which `deepcopy` doesn't copy, refers to the env or its methods in its closure."""
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # The cell is empty.
            continue
        if held is env or getattr(held, "__self__", None) is env:
            return True
    return False


def _refused(env: object, name: str, why: str) -> EnvError:
    cls = type(env).__name__
    return EnvError(
        f"{cls}.branch: self.{name} ({type(getattr(env, name)).__name__}) can't be copied: {why}; override "
        f"`async def branch(self, memo)` in {cls}: create `twin = copy.copy(self)`, copy its attributes, such as "
        f"`twin.board = copy.deepcopy(self.board, memo)`, give it a new or a shared `{name}`, and return it"
    )
