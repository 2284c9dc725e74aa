"""Tools from typed methods, whose signatures define the schema and the validation of arguments."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, overload

from pydantic import BaseModel, ValidationError

from agentgym.config_fields import names_its_arguments
from agentgym.errors import EnvError
from agentgym.tools.argument_models import arguments_of, check_types
from agentgym.tools.declarations import check_target, check_tool, marked
from agentgym.types.messages import Image
from agentgym.types.tool_names import check_tool_name

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_S = 30.0
"""Maximum seconds of one call to a tool that doesn't set its own limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The return value of a tool that ends the rollout."""

    reason: str
    """The rollout's `stop_reason`: any non-empty text."""
    content: str | Image | Sequence[str | Image] = ""
    """Content of the tool's last message: text, an image, or a list like a tool's return value."""

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("reason: must not be empty")


@dataclass(frozen=True, slots=True)
class _Mark:
    timeout_s: float
    name: str | None
    parallel: bool
    root: bool


@overload
def tool(function: F) -> F: ...
@overload
def tool(
    *, timeout_s: float = ..., name: str | None = ..., parallel: bool = ..., root: bool = ...
) -> Callable[[F], F]: ...
@names_its_arguments
def tool(
    function: Callable[..., Any] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    name: str | None = None,
    parallel: bool = False,
    root: bool = True,
) -> Callable[..., Any]:
    """Offer a method to the model: its docstring is the description, and its signature is the schema.

    The method is async or plain; a plain one runs in a separate thread and never blocks the event loop. If it is an
    async generator, its texts are logged by `agentgym.tools` as they arrive, and the model reads them as one text.

    Args:
        function: The method, if the decorator is used without arguments.
        timeout_s: Maximum seconds of one call; a call that takes longer is ended, and the model reads that it timed
            out.
        name: The name that the model uses; by default the method's name.
        parallel: Whether calls of the tool may run at the same time, with one another and with calls of other
            parallel tools. If so, adjacent calls in one turn run concurrently.
        root: Whether the rollout's first conversation has the tool. If False, only sub-agents that are given it have
            it.

    Raises:
        ValueError: If `timeout_s` isn't positive, or `parallel` isn't a bool.
        TypeError: If the decorator is applied to anything but a function.
    """
    check_settings(timeout_s, parallel)

    def mark(target: F) -> F:
        check_target(target, "@ag.tool", 'write `@ag.tool`, or `@ag.tool(name="look", timeout_s=60)`')
        target.__agentgym_tool__ = _Mark(timeout_s, name, parallel, root)  # type: ignore[attr-defined]
        return target

    return mark(function) if function is not None else mark


def check_settings(timeout_s: float, parallel: bool, name: str = "timeout_s") -> None:
    """Raise ValueError if a time limit isn't positive, or `parallel` is neither True nor False."""
    if timeout_s <= 0 or math.isnan(timeout_s):
        raise ValueError(f"{name}: must be positive, got {timeout_s}")
    if not isinstance(parallel, bool):
        raise ValueError(f"parallel: must be True or False, got {parallel!r}")


class WrongArguments(ValueError):
    """Raised if a call's arguments don't fit the tool's schema; the message tells the model each wrong argument."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of a class, with its schema and argument validation."""

    name: str
    """The name that the model uses."""
    attribute: str
    """The method's name."""
    timeout_s: float
    """Maximum seconds of one call."""
    parallel: bool
    """Whether its calls may run at the same time as those of other parallel tools."""
    root: bool
    """Whether the rollout's first conversation has the tool; if False, only sub-agents can have it."""
    arguments: type[BaseModel]
    """The pydantic model that validates the arguments."""
    schema: dict[str, Any]
    """The schema that the model sees, in OpenAI's format."""

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the validated keyword arguments; raise WrongArguments, naming each wrong field, if they don't fit."""
        return bound_arguments(self.arguments, arguments)

    def function_of(self, owner: object) -> Callable[..., Any]:
        """Return this owner's method; raise EnvError if an attribute hides it."""
        function: Any = getattr(owner, self.attribute)
        if not callable(function):
            where = f"tool {self.name!r} of {type(owner).__name__}"
            raise EnvError(f"{where}: hidden by self.{self.attribute} = {function!r}; rename that attribute")
        found: Callable[..., Any] = function
        return found


def bound_arguments(model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments, validated by a model of `arguments_of`.

    Raises:
        WrongArguments: If they don't fit; the message names each wrong field.
    """
    try:
        checked = model.__pydantic_validator__.validate_python(arguments)  # model_validate without its wrapper
    except ValidationError as error:
        said = (f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}" for item in error.errors())
        raise WrongArguments("; ".join(said)) from error
    return {field[2:]: value for field, value in vars(checked).items()}


@cache
def class_tools(owner: type) -> dict[str, Tool]:
    """Return every tool of a class and its bases by the name that the model uses."""
    return {name: _describe(owner, attribute, name, mark) for attribute, name, mark in declared(owner)}


def declared(owner: type) -> Iterator[tuple[str, str, _Mark]]:
    """Yield each tool's method name, the name that the model uses, and its decorator's settings.

    Annotations are not resolved, so a class can be checked before everything that they name is defined.

    Raises:
        ValueError: If the model couldn't call a tool, or two tools have the same name.
    """
    names: dict[str, str] = {}
    for attribute, mark in marked(owner, "__agentgym_tool__", "@ag.tool"):
        name = mark.name or attribute
        where = f"tool {name!r} of {owner.__name__}"
        if name in names:
            raise ValueError(f"{where}: two methods have this name, {names[name]!r} and {attribute!r}; rename one")
        names[name] = attribute
        check_tool_name(name, where, "write `@ag.tool(name={})`")
        check_tool(getattr(owner, attribute), where)
        yield attribute, name, mark


def check_tool_types(owner: type) -> None:
    """Raise ValueError if a tool parameter's type can't be read; types that aren't defined yet are skipped."""
    for attribute, name, _ in declared(owner):
        function = getattr(owner, attribute)
        check_types(function, f"tool {name!r} of {owner.__name__}", _parameters(function))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the method's parameters that the model fills in."""
    return list(inspect.signature(function).parameters.values())[1:]


def _describe(owner: type, attribute: str, name: str, mark: _Mark) -> Tool:
    function = getattr(owner, attribute)
    where = f"tool {name!r} of {owner.__name__}"
    arguments, parameters = arguments_of(function, name, where, _parameters(function))
    schema = schema_of(name, inspect.getdoc(function) or "", parameters)
    return Tool(name, attribute, mark.timeout_s, mark.parallel, mark.root, arguments, schema)


def schema_of(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema as the model sees it, in OpenAI's format."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
