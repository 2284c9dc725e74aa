"""The check of a config's fields, and the types of fields: numbers, text and folders."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

BOUNDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""Pydantic's words for bounds, and ours."""


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold the character NUL")
    return value


def _named(value: Any) -> Any:
    """Return the value; ValueError for a blank text, and for a text or a path with a NUL in it."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    if isinstance(value, str | Path):
        _without_nul(str(value))
    return value


def _no_option(value: str) -> str:
    if value.lstrip().startswith("-"):
        raise ValueError("must not begin with '-', which would make an option of it")
    return value


Count: TypeAlias = Annotated[int, Field(ge=0)]
"""A whole number of at least 0."""
Positive: TypeAlias = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
"""A finite number of at least 0."""
Above0: TypeAlias = Annotated[float, Field(gt=0)]
"""A finite number above 0."""
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
"""A number above 0, and at most 1."""
PartBelow1: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""A number of at least 0, and below 1."""
Text: TypeAlias = Annotated[str, AfterValidator(_without_nul)]
"""Text without a NUL; it may be empty."""
Name: TypeAlias = Annotated[str, BeforeValidator(_named)]
"""Text with more in it than blanks, and without a NUL."""
Names: TypeAlias = Annotated[tuple[Name, ...], Field(strict=False)]
"""Texts as `Name` has them; a list or another row of them becomes a tuple."""
Word: TypeAlias = Annotated[Name, AfterValidator(_no_option)]
"""A name that a program gets as a word of its command line: it does not begin with "-"."""
Words: TypeAlias = Annotated[tuple[Word, ...], Field(strict=False)]
"""Texts as `Word` has them; a list or another row of them becomes a tuple."""
Texts: TypeAlias = Annotated[tuple[Annotated[Text, Field(min_length=1)], ...], Field(strict=False)]
"""Texts without a NUL, none of them empty; a list of them becomes a tuple."""
MAX_STOPS = 16
"""Texts that may end a turn."""
MAX_STOP_LENGTH = 256
"""Characters of a text that ends a turn: each of them is looked for after each token."""
Stops: TypeAlias = Annotated[
    tuple[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...],
    Field(strict=False, max_length=MAX_STOPS),
]
"""Texts that end a turn, as `Texts` has them: at most 16, of at most 256 characters."""
Folder: TypeAlias = Annotated[Path, Field(strict=False), BeforeValidator(_named)]
"""A path, or its text, which becomes one; without a NUL."""
FolderOrName: TypeAlias = Annotated[Path | str, BeforeValidator(_named)]
"""A path, or a text that is kept as it is; without a NUL."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to write in place of a name that is not known: the nearest known one, or else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names) or 'none'}"


def names_its_fields(cls: C) -> C:
    """Make a dataclass say, in the TypeError for a field that it does not have, which one is meant.

    Its `ELSEWHERE` are classes of the same use: one of them that has the field is named.
    """
    made: Any = cls
    init, known = made.__init__, [field.name for field in fields(made) if field.init]
    others: tuple[Any, ...] = getattr(made, "ELSEWHERE", ())

    @wraps(init)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                raise TypeError(f"{cls.__name__}: there is no field {name!r}; {_meant(name, known, others)}")
        init(self, *values, **named)

    made.__init__ = checked
    return cls


def _meant(name: str, known: Iterable[str], others: Iterable[Any]) -> str:
    owners = [other.__name__ for other in others if any(field.name == name for field in fields(other))]
    return f"ag.{owners[0]} has it" if owners else nearest(name, known)


def names_its_arguments(function: F) -> F:
    """Make a function say, in the TypeError for an argument that it does not take, which one is meant."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    known = {name for name, each in signature(function).parameters.items() if each.kind in kinds} - {"self"}

    @wraps(function)
    def checked(*values: Any, **named: Any) -> Any:
        for name in named:
            if name not in known:
                raise TypeError(f"{function.__name__}: there is no argument {name!r}; {nearest(name, known)}")
        return function(*values, **named)

    return cast("F", checked)


def check_fields(config: Any, owner: type) -> None:
    """Check that every field of `owner` has a value of its type within its bounds; ValueError names one that has not.

    Types are exact: True is no number, and a text is none either. A whole number becomes a float where one is meant,
    and a field's own type may take more (`Folder` takes text).
    """
    for name, adapter in _adapters(owner).items():
        value = getattr(config, name)
        try:
            checked = adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(_what_to_give(name, value, error.errors(include_url=False))) from None
        object.__setattr__(config, name, checked)


def require_instance(name: str, value: object, owner: type) -> None:
    """Raise ValueError, naming the argument, where it is no instance of its class."""
    if not isinstance(value, owner):
        raise ValueError(f"{name}: must be an instance of {owner.__name__}, got {value!r}")


@cache
def _adapters(owner: type) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: _adapter(hints[field.name]) for field in fields(owner)}


def _adapter(hint: Any) -> TypeAdapter[Any]:
    if is_dataclass(hint):
        return TypeAdapter(InstanceOf[hint])  # pydantic would make one of a dict, and takes no configuration for it
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _what_to_give(name: str, value: Any, errors: list[ErrorDetails]) -> str:
    """Return the field, or the place in it, what the members of its union ask for that got furthest, and what they got.

    Of a mapping only the value at fault is shown: others of it may be secrets.
    """
    depth = max(len(error["loc"]) for error in errors)
    furthest = [error for error in errors if len(error["loc"]) == depth]
    loc = furthest[0]["loc"]
    keys = [part for part in loc if isinstance(value, Mapping) and part in value]
    place = "".join(f".{part}" for part in loc if isinstance(part, int) and part not in keys)
    within = "".join(f"the name {key!r} " if "[key]" in loc else f"{key!r} " for key in keys)
    asked = dict.fromkeys(map(_asked, furthest))
    return f"{name}{place}: {within}{', or '.join(asked)}, got {(furthest[0]['input'] if keys else value)!r}"


def _asked(error: ErrorDetails) -> str:
    if error["type"] == "too_short":
        return f"must have at least {error['ctx']['min_length']} item"
    if error["type"] == "too_long":
        what = "characters" if isinstance(error["input"], str) else "items"
        return f"must have at most {error['ctx']['max_length']} {what}"
    if error["type"] == "dict_type":
        return "must be a mapping"
    if error["type"] == "string_type":
        return "must be text"
    said = error["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    for theirs, ours in BOUNDS.items():
        said = said.replace(f" {theirs} ", f" {ours} ")
    return said[0].lower() + said[1:]
