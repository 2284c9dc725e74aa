"""Tools of one instance: from a schema, from plain functions, and from the methods of a plain object."""

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from agentgym.tools.argument_models import arguments_of
from agentgym.tools.argument_schemas import checked, validator_of
from agentgym.tools.declarations import check_offered
from agentgym.tools.tool import TIMEOUT_S, Tool, WrongArguments, bound_arguments, check_settings, schema_of
from agentgym.types.tool_names import check_tool_name


@dataclass(frozen=True, slots=True)
class DynamicTool:
    """A tool of a single env instance, returned by `extra_tools`; its arguments are validated before each call.

    Raises:
        ValueError: If a field is invalid; the message names it.
        MissingPackage: If `check` isn't given and the package `jsonschema` isn't installed.
    """

    name: str
    """The name that the model uses."""
    description: str
    """The description that the model reads."""
    parameters: Mapping[str, Any]
    """The JSON schema of the arguments: an object whose properties are the arguments."""
    call: Callable[..., Any]
    """The function that is called with the arguments by name: async, or plain and run in a separate thread.

    If it is a method of the env, a sub-agent's calls use the method of the sub-agent's own copy of the env.
    """
    timeout_s: float = TIMEOUT_S
    """Maximum seconds of one call."""
    parallel: bool = False
    """Whether its calls may run at the same time as those of other parallel tools."""
    root: bool = True
    """Whether the rollout's first conversation has the tool; if False, only sub-agents that are given it do."""
    check: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = field(default=None, repr=False, compare=False)
    """Function that returns the arguments for `call`, or raises ValueError for the model; None uses `parameters`."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name: must be a non-empty string, got {self.name!r}")
        where = f"tool {self.name!r:.200}"
        check_tool_name(self.name, where, "for example {}")
        if not isinstance(self.description, str):
            raise ValueError(f"{where}: description: must be text, got {self.description!r:.80}")
        if not callable(self.call):
            raise ValueError(f"{where}: call: must be a function, got {self.call!r:.80}")
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type") != "object":
            example = '{"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}'
            raise ValueError(f"{where}: parameters: must be the JSON schema of an object, such as {example}")
        check_settings(self.timeout_s, self.parallel)
        try:
            text = json.dumps(self.parameters)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: parameters: expected valid JSON: {error}") from error
        if self.check is None:
            object.__setattr__(self, "check", partial(checked, validator_of(text, where)))

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that the model sees, in OpenAI's format."""
        return schema_of(self.name, self.description, self.parameters)

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate a call's arguments.

        Args:
            arguments: The arguments that the model wrote, by name.

        Returns:
            The keyword arguments for `call`.

        Raises:
            WrongArguments: If they don't fit; the message says what is wrong.
        """
        assert self.check is not None
        try:
            return dict(self.check(arguments))
        except WrongArguments:
            raise
        except ValueError as error:
            raise WrongArguments(str(error)) from error

    def function_of(self, owner: object) -> Callable[..., Any]:
        """Return the function to call: `call`, or the owner's own method if `call` is a method of an env of its type.

        Args:
            owner: The env whose tool is called; it may be a copy of the env that `call` is bound to.
        """
        if type(getattr(self.call, "__self__", None)) is type(owner):
            method: Callable[..., Any] = getattr(owner, self.call.__name__)
            return method
        return self.call


AnyTool: TypeAlias = Tool | DynamicTool


def by_name(given: Any, declared: Collection[str]) -> dict[str, DynamicTool]:
    """Return the tools that `extra_tools` returned, by name.

    Raises:
        TypeError: If they aren't a list of DynamicTool.
        ValueError: If two have the same name, or one has the name of a declared tool.
    """
    if isinstance(given, DynamicTool) or not isinstance(given, Sequence):
        raise TypeError(f"must return a list of agentgym.tools.DynamicTool, got {given!r:.80}")
    found: dict[str, DynamicTool] = {}
    for made in given:
        if not isinstance(made, DynamicTool):
            raise TypeError(
                f"must return a list of agentgym.tools.DynamicTool, got a list with {made!r:.80}; "
                f"agentgym.tools.tools_of creates them"
            )
        if made.name in declared:
            raise ValueError(f"{made.name!r} is also the name of a declared tool; rename one of them")
        if made.name in found:
            raise ValueError(f"{made.name!r} is the name of two tools; rename one of them")
        found[made.name] = made
    return found


def tools_of(
    *sources: Any,
    names: Collection[str] | None = None,
    prefix: str = "",
    timeout_s: float = TIMEOUT_S,
    parallel: bool = False,
) -> list[DynamicTool]:
    """Return a tool for each function, and for each public method of every other object.

    Docstrings become the descriptions and signatures the schemas, as for methods under `@ag.tool`. A function's or
    method's own settings in that decorator take precedence over `timeout_s` and `parallel`.

    Args:
        sources: Functions, and objects whose public methods become tools.
        names: The functions and methods to use; None uses all of them.
        prefix: Text put in front of each name.
        timeout_s: Maximum seconds of one call.
        parallel: Whether the calls may run at the same time as those of other parallel tools.

    Returns:
        The tools, in the order of the sources.

    Raises:
        TypeError: If a source is a class or a module, or `names` is not a list.
        ValueError: If the model couldn't call a function, or a name in `names` doesn't exist; the message names it.
    """
    check_names(names)
    found = {name: function for source in sources for name, function in _functions(source)}
    if names is not None and (unknown := [name for name in names if name not in found]):
        raise ValueError(f"names: {unknown[0]!r} is not one of the tools: {', '.join(found) or 'there are none'}")
    chosen = [function for name, function in found.items() if names is None or name in names]
    return [_made(function, prefix, timeout_s, parallel) for function in chosen]


def check_names(names: Collection[str] | None) -> None:
    """Raise TypeError if `names` is one name instead of a list of names."""
    if isinstance(names, str):
        raise TypeError(f"names: must be a list of names, such as [{names!r}], got {names!r}")


def _functions(source: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    if inspect.isroutine(source):
        yield source.__name__, source
        return
    if inspect.isclass(source) or inspect.ismodule(source):
        what = "the class" if inspect.isclass(source) else "the module"
        raise TypeError(f"tools_of: expected functions and objects, got {what} {source.__name__}")
    names = dict.fromkeys(name for base in reversed(type(source).__mro__) for name in vars(base))
    methods = [name for name in names if not name.startswith("_") and _is_method(source, name)]
    if not methods:
        raise ValueError(f"tools_of: {type(source).__name__} has no public method")
    for name in methods:
        yield name, getattr(source, name)


def _is_method(source: Any, name: str) -> bool:
    static = inspect.getattr_static(source, name)
    return inspect.isfunction(static) or isinstance(static, staticmethod | classmethod)


def _made(function: Callable[..., Any], prefix: str, timeout_s: float, parallel: bool) -> DynamicTool:
    mark = getattr(function, "__agentgym_tool__", None)
    name = prefix + (getattr(mark, "name", None) or function.__name__)
    of = f" of {type(function.__self__).__name__}" if inspect.ismethod(function) else ""
    where = f"tool {name!r}{of}"
    parameters = list(inspect.signature(function).parameters.values())
    check_offered(function, where, parameters)
    arguments, schema = arguments_of(function, name, where, parameters)
    return DynamicTool(
        name,
        inspect.getdoc(function) or "",
        schema,
        function,
        timeout_s=timeout_s if mark is None else mark.timeout_s,
        parallel=parallel if mark is None else mark.parallel,
        check=partial(bound_arguments, arguments),
    )
