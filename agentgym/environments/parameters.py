"""Parameters of an env class: values that a run or an evaluation may set."""

import inspect
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentgym.config_fields import nearest

T = TypeVar("T")
EnvT = TypeVar("EnvT", bound=type)


class Parameter(Generic[T]):
    """Declares a value of an env class that a run may set: `difficulty = ag.Parameter(3)`.

    Reading the attribute on the class or on an instance returns the value.

    Args:
        default: The default value: a number, a bool or text.
        kind: The type, optionally with bounds: `ag.Parameter(3, Annotated[int, Field(ge=1, le=9)])`; by default the
            default's own type.
        doc: Description for the `--help` of a recipe.

    Raises:
        ValueError: If the default isn't of that type, or is neither a number, a bool nor text.
    """

    def __init__(self, default: T, kind: Any = None, *, doc: str = "") -> None:
        if not isinstance(default, bool | int | float | str):
            raise ValueError(f"Parameter: the default must be a number, a bool or text, got {default!r}")
        self.kind = type(default) if kind is None else kind
        self.doc = doc
        self._adapter: TypeAdapter[T] = TypeAdapter(self.kind, config=ConfigDict(strict=True, allow_inf_nan=False))
        self.value = self.check(default, "Parameter")

    def __get__(self, env: object, owner: type) -> T:
        return self.value

    def check(self, value: Any, name: str) -> T:
        """Return the value if it is of the parameter's type.

        Args:
            value: The value to validate.
            name: The parameter's name in the message.

        Raises:
            ValueError: If the value isn't of the type, which includes its bounds; the message begins with `name`.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise _refused(error, value, name) from None

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the parameter's type."""
        return self._adapter.json_schema()

    def read(self, text: str, name: str) -> T:
        """Parse a text from the command line.

        Args:
            text: The text from the command line.
            name: The parameter's name in the message.

        Raises:
            ValueError: If the text isn't a value of the parameter's type; the message begins with `name`.
        """
        try:
            return self._adapter.validate_strings(text, strict=False)
        except ValidationError as error:
            raise _refused(error, text, name) from None


def parameters(env: type) -> dict[str, Parameter[Any]]:
    """Return the parameters that an env class declares or inherits, by name."""
    static = ((name, inspect.getattr_static(env, name)) for owner in reversed(env.__mro__) for name in vars(owner))
    return {name: found for name, found in static if isinstance(found, Parameter)}


def configured(env: EnvT, arguments: Mapping[str, Any], *, prefix: str = "") -> EnvT:
    """Return a subclass of the env, with the same name, that has these parameter values; without any, the env itself.

    Args:
        env: The env class.
        arguments: Values by parameter name.
        prefix: Text put in front of the name in messages.

    Raises:
        ValueError: If the env doesn't declare a name, or a value isn't of the parameter's type; the message begins with
            the prefix and the name.
    """
    if not arguments:
        return env
    made = {}
    for name, value in arguments.items():
        declared = _declared(env, name, prefix)
        made[name] = Parameter(declared.check(value, f"{prefix}{name}"), declared.kind, doc=declared.doc)
    return variant(env, made)


def variant(env: EnvT, members: Mapping[str, Any]) -> EnvT:
    """Return a subclass of the env, with the same name, in which `members` are set as class attributes."""
    body = {name: getattr(env, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(env)(env.__name__, (env,), {**body, **members})


def read_arguments(env: type, texts: Mapping[str, str], *, prefix: str = "") -> dict[str, Any]:
    """Parse the texts of parameters from a command line.

    Args:
        env: The env class.
        texts: The text for each parameter, by the parameter's name.
        prefix: Text put in front of each name, in the result and in messages, such as "member." for a mixture's
            member.

    Returns:
        The values by name, with the prefix in front of each name.

    Raises:
        ValueError: If the env doesn't declare a name, or a text isn't a value of the parameter's type; the message
            begins with the prefix and the name.
    """
    named = {f"{prefix}{name}": (_declared(env, name, prefix), text) for name, text in texts.items()}
    return {name: declared.read(text, name) for name, (declared, text) in named.items()}


def _declared(env: type, name: str, prefix: str) -> Parameter[Any]:
    known = parameters(env)
    if name in known:
        return known[name]
    raise ValueError(f"{prefix}{name}: {env.__name__} has no such parameter; {nearest(name, known)}")


def _refused(error: ValidationError, value: Any, name: str) -> ValueError:
    said = error.errors(include_url=False)[0]["msg"].replace("Input should", "must", 1)
    return ValueError(f"{name}: {said}, got {value!r}")
