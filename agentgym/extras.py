"""The optional packages, and which extra of agentgym brings each."""

from types import TracebackType
from typing import Literal

from agentgym.errors import AgentGymError

EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "jinja2": "train",
    "regex": "train",
    "docker": "docker",
    "requests": "docker",
    "gymnasium": "gymnasium",
}
"""From the name that is imported to the extra."""


class MissingPackage(AgentGymError, ImportError):
    """An optional package is not installed; the message is the command that installs it."""


class needs_extra:
    """Turn the failed import of an optional package into MissingPackage; whatever else is raised passes unchanged."""

    def __enter__(self) -> None:
        """Nothing to open."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in EXTRAS:
            raise MissingPackage(
                f"{name} is not installed: pip install 'agentgym[{EXTRAS[name]}]'", name=name
            ) from None
        return False
