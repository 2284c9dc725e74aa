"""Checks of an env class's declarations, run when the class is created, so that mistakes surface before any rollout.

They don't resolve annotations, because an annotation may name something that is defined later.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from types import UnionType
from typing import Any

NEARLY = 0.82
"""Similarity above which a name counts as misspelled: "sysetm" is close enough to "system", "stem" is not."""


def marked(owner: type, mark: str, decorator: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each method that has the attribute `mark`, and its value, in definition order.

    Args:
        owner: The class; its bases are included.
        mark: Name of the attribute that the decorator sets.
        decorator: The decorator as error messages name it, such as "@ag.tool".

    Raises:
        ValueError: If an attribute with a mark isn't a method, or if such a method was overridden without its
            decorator. (Overriding it with None removes it.)
    """
    for name in dict.fromkeys(name for base in reversed(owner.__mro__) for name in vars(base)):
        static = inspect.getattr_static(owner, name)
        where = f"{name!r} of {owner.__name__}"
        if isinstance(static, property | staticmethod | classmethod):
            inner = static.fget if isinstance(static, property) else static.__func__
            if hasattr(inner, mark):
                raise ValueError(f"{where}: {decorator} only works on a method, not on a {type(static).__name__}")
        if isinstance(static, type):
            continue
        if hasattr(static, mark):
            yield name, getattr(static, mark)
        elif static is not None and any(hasattr(vars(base).get(name), mark) for base in owner.__mro__):
            raise ValueError(
                f"{where} is overridden without {decorator}; add the decorator, or write `{name} = None` to remove it"
            )


def check_target(target: object, decorator: str, use: str) -> None:
    """Raise TypeError if a decorator is applied to anything but a function; `use` says what to write instead."""
    if not inspect.isfunction(target):
        shown = repr(target) if isinstance(target, str | int | float) else f"a {type(target).__name__}"
        raise TypeError(f"{decorator}: expected a method, got {shown}; {use}")


def check_tool(function: Callable[..., Any], where: str) -> None:
    """Raise ValueError if the model couldn't call the method: every parameter needs a name and a type."""
    check_offered(function, where, _parameters(function, where))


def check_offered(function: Callable[..., Any], where: str, parameters: Iterable[inspect.Parameter]) -> None:
    """Raise ValueError if the model couldn't call a function with these parameters."""
    if not inspect.getdoc(function):
        raise ValueError(f"{where} needs a docstring, which the model reads")
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        raise ValueError(f"{where} is a plain generator; write `async def` to yield text, or return one value")
    for parameter in parameters:
        named = f"{where}: parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{named} must be a named parameter, because the model passes arguments by name")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{named} is positional-only, but the model passes arguments by name; remove the `/`")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"{named} needs a type annotation")


def check_reward(function: Callable[..., Any], where: str) -> None:
    """Raise ValueError if a reward can't be called with only `self`, or is a generator."""
    _check_kind(function, where)
    for parameter in _parameters(function, where):
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise ValueError(f"{where} is called with only `self`, but parameter {parameter.name!r} has no default")


def check_free(name: str, taken: frozenset[str], where: str, decorator: str) -> None:
    """Raise ValueError if the library itself uses the method's name."""
    if name in taken:
        raise ValueError(f"{where}: agentgym's own classes use {name!r}; give the method another name{decorator}")


def check_awaited(owner: type, name: str) -> None:
    """Raise ValueError if a method that agentgym awaits isn't an `async def`; a decorated `async def` counts as one."""
    where = f"{owner.__name__}.{name}"
    if not callable(found := getattr(owner, name)):
        raise ValueError(f"{where}: must be a method, got {found!r:.80}; write `async def {name}(...)`")
    function = _function_in(inspect.getattr_static(owner, name))
    _check_kind(function, where)
    if inspect.isfunction(function) and not _is_async(function):
        raise ValueError(f"{where} is a plain `def`, but agentgym awaits it; write `async def {name}(...)`")


def check_on_class(owner: type, name: str) -> None:
    """Raise ValueError if a method that agentgym calls on the class itself needs an instance, or is async."""
    where, use = f"{owner.__name__}.{name}", f"write `@classmethod` above `def {name}(cls, ...)`"
    static = inspect.getattr_static(owner, name)
    if inspect.isfunction(static):
        raise ValueError(f"{where} is called on the class, without an instance; {use}")
    if not callable(found := getattr(owner, name)):
        raise ValueError(f"{where}: must be a method of the class, got {found!r:.80}; {use}")
    function = _function_in(static)
    _check_kind(function, where)
    if _is_async(function):
        raise ValueError(f"{where} is an `async def`, but agentgym does not await it; write a plain `def`")


def check_opened(owner: type, name: str) -> None:
    """Raise ValueError if a method can't be opened with `async with` on the class itself, as agentgym does."""
    where = f"{owner.__name__}.{name}"
    use = f"write `@classmethod`, below it `@asynccontextmanager`, and `async def {name}(cls)` with one `yield`"
    static = inspect.getattr_static(owner, name)
    if not isinstance(static, classmethod):
        raise ValueError(f"{where} is called on the class, without an instance; {use}")
    function = static.__func__
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{where} is opened with `async with`, but is a bare `async def`; {use}")


def check_read(owner: type, name: str) -> None:
    """Raise ValueError if an attribute that agentgym reads is a method."""
    if inspect.isfunction(inspect.getattr_static(owner, name)):
        raise ValueError(f"{owner.__name__}.{name} is read, not called; write `@property` above `def {name}(self)`")


def check_made(value: object, kind: type | UnionType | tuple[()], where: str, example: str) -> None:
    """Raise ValueError if a class attribute isn't an instance of `kind`, for example a class without its `()`."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__} without ()" if isinstance(value, type) else repr(value)
        raise ValueError(f"{where}: must be {example}, got {got}")


def check_settings(owner: type, settings: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raise ValueError if a class sets a value under a misspelled setting name.

    An attribute counts as misspelled if its name is close to that of a setting that the class doesn't set, and its
    value would be valid for that setting. All other attributes are the user's own.

    Args:
        owner: The class.
        settings: The name of each setting, with a function that returns whether a value is valid for it.
    """
    for name, value in vars(owner).items():
        close = get_close_matches(name, settings, n=1, cutoff=NEARLY)
        if close and close[0] not in vars(owner) and settings[close[0]](value):
            raise ValueError(f"{owner.__name__}.{name} is not an env setting; did you mean {close[0]!r}?")


def check_whole(name: str, value: object, *, may_be_none: bool = False) -> None:
    """Raise ValueError if a setting isn't a whole number."""
    if may_be_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}: must be a whole number, got {value!r}")


def check_number(name: str, value: object) -> None:
    """Raise ValueError if a setting isn't a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name}: must be a finite number, got {value!r}")


def _function_in(static: Any) -> Any:
    return static.__func__ if isinstance(static, staticmethod | classmethod) else static


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether the function is an `async def`, or a decorator's wrapper around one."""
    return inspect.iscoroutinefunction(inspect.unwrap(function, stop=inspect.iscoroutinefunction))


def _check_kind(function: Callable[..., Any], where: str) -> None:
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ValueError(f"{where} is a generator; return one value instead of yielding several")


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """Return the parameters after `self`; raise ValueError if the first one, which gets the env, isn't `self`."""
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0] if parameters else None
    if first is None or (first.name != "self" and first.kind is not inspect.Parameter.VAR_POSITIONAL):
        got = f", got {first.name!r}" if first is not None else ""
        raise ValueError(f"{where} needs `self` as its first parameter{got}")
    return parameters[1:]
