"""A user-defined engine, configured by the name of its class."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from agentgym.config_fields import Name, Positive, config


@config(frozen=True, kw_only=True)
class CustomEngineConfig:
    """Configuration of a user-defined engine, whose class is called with the run's model.

    If the engine is an async context manager, the run enters it.
    """

    name: Name
    """The class, as "package.module:Class"."""
    slots: Positive = 64
    """Number of rollouts that run at the same time."""

    def __post_init__(self) -> None:
        module, _, attribute = self.name.partition(":")
        if not (module and attribute):
            raise ValueError(f"name: expected package.module:Class, got {self.name!r}")

    def load(self) -> Callable[[Any], Any]:
        """Import and return the class.

        Raises:
            ValueError: If the module doesn't exist, or has no callable with that name that takes one argument.
        """
        module, _, attribute = self.name.partition(":")
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"engine: {self.name!r}: no module named {error.name}; is its folder on PYTHONPATH?"
            ) from None
        if not hasattr(imported, attribute):
            raise ValueError(f"engine: {self.name!r}: {module} has no {attribute}")
        found: Any = getattr(imported, attribute)
        if not callable(found):
            raise ValueError(
                f"engine: expected a class, but {self.name!r} is of type {type(found).__name__}; name a class"
            )
        if (parameters := _refusing(found)) is not None:
            raise ValueError(
                f"engine: {self.name!r} is called with one argument, the model, but its parameters are {parameters}; "
                "change them to (model)"
            )
        made: Callable[[Any], Any] = found
        return made


def _refusing(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return a function's parameters if it can't be called with one argument; None if it can, or they are unknown."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False)  # a decorator may add arguments
    except (TypeError, ValueError):  # such as some classes written in C
        return None
    try:
        parameters.bind("model")
    except TypeError:
        return parameters
    return None
