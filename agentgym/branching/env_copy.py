"""Copies of environments in the middle of a rollout."""

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from types import FunctionType, MethodType
from typing import Any, TypeVar

from agentgym.errors import EnvError

EnvT = TypeVar("EnvT")


def copied(env: EnvT, memo: dict[int, Any]) -> EnvT:
    """Return a copy of an env that shares only what `memo` says, and what cannot change.

    `memo` is that of `copy.deepcopy`: by the id of an object it has what stands in its place, such as the branch of the
    box for the box. EnvError names an attribute that cannot be copied, and says what to write.
    """
    twin = copy(env)
    memo[id(env)] = twin
    for name in _attributes(env):
        value = getattr(env, name)
        if (function := _bound_to(value, env)) is not None:
            raise _refused(env, name, f"{function} was made with this instance in it, and would go on with it")
        try:
            setattr(twin, name, deepcopy(value, memo))
        except Exception as error:
            raise _refused(env, name, f"{error}") from error
    return twin


def _attributes(env: object) -> list[str]:
    """Return the names of an instance's own attributes, those in slots too."""
    slots = (name for cls in type(env).__mro__ for name in _listed(vars(cls).get("__slots__", ())))
    own = [name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(env, name)]
    return [*vars(env), *own]


def _listed(slots: str | Sequence[str]) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else slots


def _bound_to(value: Any, env: object) -> str | None:
    """Return the name of a function in `value` that keeps the env in its closure; None where there is none.

    `deepcopy` shares functions: the copy would change the env that it was copied from.
    """
    for function in _functions(value):
        cells = function.__closure__ or ()
        held = [cell.cell_contents for cell in cells if not _is_empty(cell)]
        if any(each is env or getattr(each, "__self__", None) is env for each in held):
            return function.__qualname__
    return None


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in an attribute: itself, those in it, and those that tools in it call."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    for each in inner:
        for found in (each, getattr(each, "call", None)):
            if isinstance(found, FunctionType) and not isinstance(found, MethodType):
                yield found


def _refused(env: object, name: str, why: str) -> EnvError:
    cls = type(env).__name__
    return EnvError(
        f"{cls}.branch: self.{name} ({type(getattr(env, name)).__name__}) cannot be copied: {why}; override "
        f"`async def branch(self, memo)` in {cls}: make `twin = copy.copy(self)`, give it its own parts, such as "
        f"`twin.board = copy.deepcopy(self.board, memo)`, and a `{name}` of its own or one to share, and return it"
    )
