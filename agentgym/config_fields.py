"""Configs, whose fields pydantic checks, and the types of their fields: numbers, text and folders."""

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


def _row(value: Any) -> Any:
    """Return the value; ValueError for one text in the place of a row of them."""
    if isinstance(value, str):
        raise ValueError(f"a tuple of texts, such as ({value!r},)")
    return value


def _no_option(value: str) -> str:
    if value.lstrip().startswith("-"):
        raise ValueError("must not begin with '-', which would make an option of it")
    return value


Count: TypeAlias = Annotated[int, Field(ge=0)]
"""A whole number of at least 0."""
Positive: TypeAlias = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number that every random generator takes, and no other one stands for: 0 to 2**63 - 1."""
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
Names: TypeAlias = Annotated[tuple[Name, ...], Field(strict=False), BeforeValidator(_row)]
"""Texts as `Name` has them; a list or another row of them becomes a tuple."""
Word: TypeAlias = Annotated[Name, AfterValidator(_no_option)]
"""A name that a program gets as a word of its command line: it does not begin with "-"."""
Words: TypeAlias = Annotated[tuple[Word, ...], Field(strict=False), BeforeValidator(_row)]
"""Texts as `Word` has them; a list or another row of them becomes a tuple."""
MAX_STOPS = 16
"""Texts that may end a turn."""
MAX_STOP_LENGTH = 256
"""Characters of a text that ends a turn: each of them is looked for after each token."""
Stops: TypeAlias = Annotated[
    tuple[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...],
    Field(strict=False, max_length=MAX_STOPS),
]
"""Texts that end a turn: at most 16, of 1 to 256 characters; a list of them becomes a tuple."""
Folder: TypeAlias = Annotated[Path, Field(strict=False), BeforeValidator(_named)]
"""A path, or its text, which becomes one; without a NUL."""
FolderOrName: TypeAlias = Annotated[Path | str, BeforeValidator(_named)]
"""A path, or a text that is kept as it is; without a NUL."""


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
"""Our names of settings, arguments and commands by those that other kits and earlier versions give them."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to write in place of a name that is not known: the nearest known one, or else all of them."""
    names = sorted(set(known))
    if (ours := ALSO_CALLED.get(name)) in names:
        return f"did you mean {ours!r}?"
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names) or 'none'}"


def checked_dataclass(**options: Any) -> Callable[[C], C]:
    """Make a config of a class: a dataclass, with the same options, whose fields pydantic checks.

    Each field has a value of its type within its bounds, also after `dataclasses.replace`, or ValueError names the
    field and says what it takes. Types are exact: True is no number, and a text is none either. A whole number
    becomes a float where one is meant, and a field's own type may take more (`Folder` takes text). A field that
    there is not is a TypeError, which says which one is meant. If a class of `ELSEWHERE` has it, that is named.
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
    """Raise TypeError for a config of a plain subclass that has an attribute for a field: nothing would read it."""
    below = cls.__mro__[: cls.__mro__.index(base)]
    for name in (field.name for field in fields(base) if any(field.name in vars(each) for each in below)):
        raise TypeError(
            f"{base.__name__}: {cls.__name__}.{name} changes nothing; fields are set when a config is made, as in "
            f"{cls.__name__}({name}=...)"
        )


if TYPE_CHECKING:  # to type checkers a config is a dataclass
    from dataclasses import dataclass as config
else:
    config = checked_dataclass


def _refusal(cls: Any, given: Mapping[str, Any], errors: list[ErrorDetails]) -> TypeError | ValueError:
    """Return what is said of a config that is refused, by the first of its fields that is at fault."""
    first = min(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    if not first["loc"]:  # by its own check, which names the field
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
        return TypeError(f"{cls.__name__}: give {', '.join(missing)}")
    return ValueError(what_to_give(name, given[name], [each for each in errors if each["loc"][0] == first["loc"][0]]))


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


def require_instance(name: str, value: object, owner: type) -> None:
    """Raise ValueError, naming the argument, where it is no instance of its class."""
    if not isinstance(value, owner):
        raise ValueError(f"{name}: must be an instance of {owner.__name__}, got {value!r}")


def what_to_give(name: str, value: Any, errors: list[ErrorDetails]) -> str:
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
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "string_type":
        return "must be text"
    said = error["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    for theirs, ours in BOUNDS.items():
        said = said.replace(f" {theirs} ", f" {ours} ")
    return said[0].lower() + said[1:]
