"""Pydantic models of tools' arguments, created from a signature and reused for functions with the same signature."""

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import CodeType, NoneType, SimpleNamespace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError

from agentgym.errors.tracebacks import describe

KEPT = 8
"""Maximum number of cached signatures per code object. A function that is redefined for each task may have several."""


class UnknownType(ValueError):
    """Raised if a tool parameter's type refers to a name that is not defined, or not yet."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool, with its annotation resolved to a type."""

    name: str
    kind: Any
    hint: Any
    default: Any

    def is_as(self, other: "Parameter") -> bool:
        """Return whether a model that was made for this parameter also fits the `other` parameter.

        Their names, kinds, defaults and types must be equal, and the types in a union must have the same order.
        """
        return (
            self.name == other.name
            and self.kind is other.kind
            and _are_one(self.hint, other.hint)
            and (self.default is other.default or (_is_value(self.default) and _are_one(self.default, other.default)))
        )


@dataclass(frozen=True, slots=True)
class Arguments:
    """A tool's parameters, with the model and the schema made from them."""

    name: str
    parameters: tuple[Parameter, ...]
    model: type[BaseModel]
    """The pydantic model that validates the arguments."""
    schema: dict[str, Any]
    """The JSON schema that the model sees, without parts that only cost tokens."""

    def are_of(self, name: str, parameters: Sequence[Parameter]) -> bool:
        """Return whether these arguments were made for a tool with this name and these parameters."""
        return (
            self.name == name
            and len(self.parameters) == len(parameters)
            and all(one.is_as(other) for one, other in zip(self.parameters, parameters, strict=True))
        )


_made: "WeakKeyDictionary[CodeType, list[Arguments]]" = WeakKeyDictionary()


def arguments_of(
    function: Callable[..., Any], name: str, where: str, parameters: Sequence[inspect.Parameter]
) -> tuple[type[BaseModel], dict[str, Any]]:
    """Return a function's argument model, with each parameter under its own name, and its JSON schema.

    Args:
        function: The tool's function.
        name: The tool's name.
        where: How error messages name the tool.
        parameters: The parameters that the model fills in.

    Raises:
        UnknownType: If a type names something that is not defined; the message begins with `where` and names the type.
        ValueError: If pydantic can't read a type; the message names it.
    """
    found = read_parameters(function, where, parameters)
    code = getattr(inspect.unwrap(function), "__code__", None)
    kept = [] if code is None else _made.setdefault(code, [])
    for made in kept:
        if made.are_of(name, found):
            return made.model, deepcopy(made.schema)
    model = _model_of(name, where, found)
    schema: dict[str, Any] = _without_titles(model.model_json_schema())
    schema.pop("additionalProperties", None)
    made = Arguments(name, tuple(found), model, schema)
    kept[:] = [*kept[1 - KEPT :], made]
    return model, deepcopy(schema)


def check_types(function: Callable[..., Any], where: str, parameters: Sequence[inspect.Parameter]) -> None:
    """Raise ValueError if pydantic can't read a parameter's type; types that aren't defined yet are skipped."""
    for parameter in parameters:
        try:
            (found,) = read_parameters(function, where, [parameter])
            if not _is_plain(found.hint):
                _model_of("checked", where, [found])
        except UnknownType:
            continue


def read_parameters(
    function: Callable[..., Any], where: str, parameters: Sequence[inspect.Parameter]
) -> list[Parameter]:
    """Return the parameters with their types resolved; raise UnknownType if an annotation names something undefined."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # The error may come from another parameter's annotation, or from that of the return value.
        hints = {parameter.name: _hint(function, where, parameter) for parameter in parameters}
    return [Parameter(each.name, each.kind, hints[each.name], each.default) for each in parameters]


def _hint(function: Callable[..., Any], where: str, parameter: inspect.Parameter) -> Any:
    inner: Any = inspect.unwrap(function)
    alone = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return get_type_hints(alone, getattr(inner, "__globals__", {}), include_extras=True)[parameter.name]
    except Exception as error:
        raise UnknownType(
            f"{where}: parameter {parameter.name!r}: its type {parameter.annotation!r} can't be resolved "
            f"({describe(error)}); import it at the top of the module, not under TYPE_CHECKING"
        ) from error


def _model_of(name: str, where: str, parameters: Sequence[Parameter]) -> type[BaseModel]:
    """Create the pydantic model of a tool's parameters.

    Args:
        name: The model's name.
        where: How error messages name the tool.
        parameters: The parameters.

    Raises:
        UnknownType: If a type names something that is not defined.
        ValueError: If pydantic can't read a type; the message names the first such parameter.
    """
    try:
        return _created(name, where, parameters)
    except (UnknownType, OSError, MemoryError):  # OSError and MemoryError are failures of the machine.
        raise
    except Exception as error:
        wrong = _first_wrong(where, parameters) or f"{where}: {_first_line(error)}"
    raise ValueError(wrong)


def _first_wrong(where: str, parameters: Sequence[Parameter]) -> str | None:
    for parameter in parameters:
        try:
            _created("checked", where, [parameter])
        except Exception as error:
            return (
                f"{where}: parameter {parameter.name!r}: pydantic can't read the type {_shown(parameter.hint)}: "
                f"{_first_line(error)}; use text, a number, a list of these or a pydantic model"
            )
    return None


def _first_line(error: Exception) -> str:
    return describe(error).partition("\n")[0].partition(". Set `arbitrary")[0].rstrip(".")


def _created(name: str, where: str, parameters: Sequence[Parameter]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for parameter in parameters:
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        # An alias, because a parameter's name may be that of a BaseModel method, or begin with "_".
        fields[f"p_{parameter.name}"] = (Annotated[parameter.hint, Field(alias=parameter.name)], default)
    model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    try:
        model.model_rebuild()
        model.model_json_schema()
    except (NameError, PydanticUserError) as error:
        if isinstance(error, NameError) or error.code in ("class-not-fully-defined", "undefined-annotation"):
            raise UnknownType(f"{where}: a parameter's type is not defined: {describe(error)}") from error
        raise
    return model


_PLAIN = (str, int, float, bool, NoneType, list, dict)


def _is_plain(hint: Any) -> bool:
    """Return whether the type is so common that it needs no check, which would take a millisecond."""
    return hint in _PLAIN or (get_origin(hint) in _PLAIN and all(_is_plain(inner) for inner in get_args(hint)))


def _is_value(default: Any) -> bool:
    return default is None or type(default) in (str, int, float, bool)


def _are_one(first: Any, second: Any) -> bool:
    """Return whether two types, or objects within them, are equal.

    Identity isn't enough, because each reading of an annotation creates a new `Field(...)`.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, type | TypeVar):
        return False
    inner, others = get_args(first), get_args(second)
    if inner or others:
        same = get_origin(first) is get_origin(second) and len(inner) == len(others)
        return same and all(map(_are_one, inner, others))
    return repr(first) == repr(second)


def _shown(hint: Any) -> str:
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else str(hint)


_BY_NAME = ("properties", "$defs")
"""Schema keywords whose keys are the user's own names, which may be "title"."""
_VALUES = ("default", "const", "enum", "examples")
"""Schema keywords that contain the user's own values."""


def _without_titles(schema: Any) -> Any:
    """Return the schema without the titles that pydantic generates, because they only cost tokens."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _kept(key, inner) for key, inner in schema.items() if key != "title"}


def _kept(key: str, inner: Any) -> Any:
    if key in _BY_NAME:
        return {name: _without_titles(value) for name, value in inner.items()}
    return inner if key in _VALUES else _without_titles(inner)
