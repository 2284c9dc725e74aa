"""An engine of the user's own, by the name of its class."""

import importlib
from collections.abc import Callable
from typing import Any

from agentgym.config_fields import Name, Positive, config


@config(frozen=True, kw_only=True)
class CustomEngineConfig:
    """Names an engine's class, which is called with the run's model; `async with` opens it where it has that."""

    name: Name
    """The class, as "package.module:Class"."""
    slots: Positive = 64
    """Rollouts at once."""

    def __post_init__(self) -> None:
        module, _, attribute = self.name.partition(":")
        if not (module and attribute):
            raise ValueError(f"name: {self.name!r} is not package.module:Class")

    def load(self) -> Callable[[Any], Any]:
        """Import the class; ValueError that says what is missing."""
        module, _, attribute = self.name.partition(":")
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"engine: {self.name!r}: there is no module {error.name}; is its folder on the path?"
            ) from None
        if not hasattr(imported, attribute):
            raise ValueError(f"engine: {self.name!r}: {module} has no {attribute}")
        found: Any = getattr(imported, attribute)
        if not callable(found):
            raise ValueError(f"engine: {self.name!r} is a {type(found).__name__}; name the engine's class")
        made: Callable[[Any], Any] = found
        return made
