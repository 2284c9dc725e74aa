"""Config classes whose fields pydantic validates, and the types of their fields: numbers, text and folders."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

BOUNDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""This package's wording of bounds in error messages, by pydantic's wording."""


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    return value


def _named(value: Any) -> Any:
    """Return the value; raise ValueError for a blank text, or for a text or path that contains NUL."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    if isinstance(value, str | Path):
        _without_nul(str(value))
    return value


def _row(value: Any) -> Any:
    """Return the value; raise ValueError for a single text in place of a sequence of texts."""
    if isinstance(value, str):
        raise ValueError(f"must be a tuple of texts, such as ({value!r},)")
    return value


def _no_option(value: str) -> str:
    if value.lstrip().startswith("-"):
        raise ValueError("must not start with '-', which would make it an option")
    return value


Count: TypeAlias = Annotated[int, Field(ge=0)]
"""An integer of at least 0."""
Positive: TypeAlias = Annotated[int, Field(ge=1)]
"""An integer of at least 1."""
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
"""An integer from 0 to 2**63 - 1. Every random generator accepts these seeds and treats no two of them as the same."""
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
"""A finite number of at least 0."""
Above0: TypeAlias = Annotated[float, Field(gt=0)]
"""A finite number above 0."""
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
"""A number above 0 and at most 1."""
PartBelow1: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""A number of at least 0 and below 1."""
Text: TypeAlias = Annotated[str, AfterValidator(_without_nul)]
"""Text without NUL; it may be empty."""
Name: TypeAlias = Annotated[str, BeforeValidator(_named)]
"""Text that isn't blank and doesn't contain NUL."""
Names: TypeAlias = Annotated[tuple[Name, ...], Field(strict=False), BeforeValidator(_row)]
"""A tuple of texts that follow the rules of `Name`; a list or another sequence becomes a tuple."""
Word: TypeAlias = Annotated[Name, AfterValidator(_no_option)]
"""A name that a program receives as a command-line argument, so it doesn't start with "-"."""
Words: TypeAlias = Annotated[tuple[Word, ...], Field(strict=False), BeforeValidator(_row)]
"""A tuple of texts that follow the rules of `Word`; a list or another sequence becomes a tuple."""
MAX_STOPS = 16
"""Maximum number of stop texts: texts that end a turn when the model writes them."""
MAX_STOP_LENGTH = 256
"""Maximum length of a stop text in characters, because each stop text is searched for after each token."""
Stops: TypeAlias = Annotated[
    tuple[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...],
    Field(strict=False, max_length=MAX_STOPS),
]
"""Stop texts, which end a turn: at most 16, of 1 to 256 characters; a list becomes a tuple."""
Folder: TypeAlias = Annotated[Path, Field(strict=False), BeforeValidator(_named)]
"""A path without NUL; text that isn't blank becomes a path."""
FolderOrName: TypeAlias = Annotated[Path | str, BeforeValidator(_named)]
"""A path, or a text that isn't turned into a path. The text isn't blank, and neither contains NUL."""


ALSO_CALLED: Mapping[str, str] = {
    "advantage": "advantage_estimator",
    "advantage_level": "credit",
    "beta": "kl_coef",
    "box": "sandbox",
    "boxes": "sandboxes",
    "checkpointing": "gradient_checkpointing",
    "correction": "importance_sampling",
    "correction_cap": "is_cap",
    "epsilon": "clip_eps_low",
    "epsilon_high": "clip_eps_high",
    "keep": "keep_checkpoints",
    "learning_rate": "lr",
    "max_completion_length": "max_turn_tokens",
    "max_tokens": "max_turn_tokens",
    "micro_tokens": "max_tokens_per_microbatch",
    "n": "group_size",
    "normalise": "loss_agg",
    "num_generations": "group_size",
    "on_rollout": "callbacks",
    "on_step": "callbacks",
    "out": "output_dir",
    "prompts": "prompts_per_step",
    "regrade": "rescore",
    "rest_rounds": "rest_epochs",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "sinks": "callbacks",
    "staleness": "max_staleness",
    "steps": "max_steps",
    "track": "report_to",
}
"""The name of a setting, argument or command here, by its name in another library or in an earlier version."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name: the most similar of the known names, or all of them if none is similar.

    The result is a phrase for an error message. For a name in `ALSO_CALLED`, it suggests the name listed there, if
    that is a known name.
    """
    names = sorted(set(known))
    if (ours := ALSO_CALLED.get(name)) in names:
        return f"did you mean {ours!r}?"
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names) or 'none'}"


def checked_dataclass(**options: Any) -> Callable[[C], C]:
    """Return a decorator that turns a class into a config: a dataclass whose fields pydantic validates.

    Creating a config, also with `dataclasses.replace`, requires a value of the right type and within the bounds for
    each field. Otherwise, a ValueError names the field and the accepted values. Types are exact: True isn't a number,
    and neither is text. There are two exceptions: a float field converts an integer, and some field types accept
    other types, too (`Folder` accepts text).

    An unknown field raises a TypeError that suggests the intended one. A config may list other classes in a class
    variable `ELSEWHERE`: if one of them has the unknown field, the message names that class.

    Args:
        options: Further options of the dataclass decorator, such as `kw_only`.
    """
    made = dataclass(config=ConfigDict(strict=True, allow_inf_nan=False, extra="forbid"), **options)

    def checked(cls: C) -> C:
        found: Any = made(cls)
        init = found.__init__

        @wraps(init)
        def __init__(self: Any, *values: Any, **named: Any) -> None:
            _refuse_fields_as_attributes(found, type(self))
            try:
                init(self, *values, **named)
            except ValidationError as error:
                names = [field.name for field in fields(found)]
                given = dict(zip(names, values, strict=False)) | named
                raise _refusal(found, given, error.errors(include_url=False)) from None

        found.__init__ = __init__
        return cast("C", found)

    return checked


def _refuse_fields_as_attributes(base: Any, cls: Any) -> None:
    """Raise TypeError if a subclass of a config sets one of the config's fields as a class attribute.

    Such an attribute would be ignored, because the subclass isn't a dataclass itself and inherits the config's
    `__init__`.

    Args:
        base: The config.
        cls: The class of the object that is being created: the config or a subclass of it.
    """
    below = cls.__mro__[: cls.__mro__.index(base)]
    for name in (field.name for field in fields(base) if any(field.name in vars(each) for each in below)):
        raise TypeError(
            f"{base.__name__}: {cls.__name__}.{name} has no effect; set fields when creating a config, as in "
            f"{cls.__name__}({name}=...)"
        )


if TYPE_CHECKING:  # for type checkers, a config is a dataclass
    from dataclasses import dataclass as config
else:
    config = checked_dataclass


def _refusal(cls: Any, given: Mapping[str, Any], errors: list[ErrorDetails]) -> TypeError | ValueError:
    """Return the error to raise for the invalid arguments of a config.

    It is about an unknown field if there is one, and otherwise about the first invalid field.

    Args:
        cls: The config.
        given: The arguments by field name.
        errors: What pydantic found wrong with them.
    """
    first = min(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    if not first["loc"]:  # from the config's own check, which names the field
        return ValueError(first["msg"].removeprefix("Value error, "))
    name = first["loc"][0]
    name = fields(cls)[name].name if isinstance(name, int) else str(name)
    if first["type"] == "unexpected_keyword_argument":
        others: tuple[Any, ...] = getattr(cls, "ELSEWHERE", ())
        known = [field.name for field in fields(cls) if field.init]
        ours = ALSO_CALLED.get(name, name)
        owners = [other.__name__ for other in others if ours in {field.name for field in fields(other)}]
        its = "it" if ours == name else repr(ours)
        meant = f"ag.{owners[0]} has {its}" if owners and ours not in known else nearest(name, known)
        return TypeError(f"{cls.__name__}: there is no field {name!r}; {meant}")
    if first["type"] == "missing" and len(first["loc"]) == 1:
        missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing"]
        return TypeError(f"{cls.__name__}: required but missing: {', '.join(missing)}")
    return ValueError(what_to_give(name, given[name], [each for each in errors if each["loc"][0] == first["loc"][0]]))


def names_its_arguments(function: F) -> F:
    """Make a function's TypeError for an unknown argument suggest the intended one.

    Args:
        function: The function.

    Returns:
        The wrapped function.
    """
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    known = {name for name, each in signature(function).parameters.items() if each.kind in kinds} - {"self"}

    @wraps(function)
    def checked(*values: Any, **named: Any) -> Any:
        for name in named:
            if name not in known:
                raise TypeError(f"{function.__name__}: there is no argument {name!r}; {nearest(name, known)}")
        return function(*values, **named)

    return cast("F", checked)


def require_instance(name: str, value: object, owner: type) -> None:
    """Raise ValueError that names the argument if its value isn't an instance of `owner`."""
    if not isinstance(value, owner):
        raise ValueError(f"{name}: must be an instance of {owner.__name__}, got {value!r}")


def what_to_give(name: str, value: Any, errors: list[ErrorDetails]) -> str:
    """Return the error message for a field: the path inside it, the expected value there, and the actual one.

    If the field accepts several types, each of them has its own errors. The message then names only the expectations
    of the types whose errors are nested deepest in the value. If the value is a mapping, the message shows only its
    invalid entry, because the other entries may be secrets.

    Args:
        name: The field.
        value: The value that was given for it.
        errors: What pydantic found wrong with the value.
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
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "string_type":
        return "must be text"
    said = error["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    for theirs, ours in BOUNDS.items():
        said = said.replace(f" {theirs} ", f" {ours} ")
    return said[0].lower() + said[1:]
