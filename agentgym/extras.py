"""Optional packages, and the extra of agentgym that brings each of them."""

from types import TracebackType
from typing import Literal

from agentgym.errors import AgentGymError

EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "huggingface_hub": "train",
    "peft": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "jinja2": "train",
    "regex": "train",
    "docker": "docker",
    "requests": "docker",
    "gymnasium": "gymnasium",
    "pettingzoo": "pettingzoo",
    "jsonschema": "tools",
    "mcp": "mcp",
    "openai": "endpoint",
    "openenv": "openenv",
    "verifiers": "verifiers",
    "ray": "ray",
    "datasets": "trl",
    "matplotlib": "report",
    "starlette": "view",
    "uvicorn": "view",
}
"""The extra that brings each package, by the name that is imported."""


class MissingPackage(AgentGymError, ImportError):
    """An optional package is not installed; the message is the command that installs it."""


class needs_extra:
    """Turn the failed import of an optional package into MissingPackage; whatever else is raised passes unchanged."""

    def __enter__(self) -> None:
        """Do nothing: only the end of the block matters."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in EXTRAS:
            raise MissingPackage(
                f"{name} is not installed: pip install 'agentgym[{EXTRAS[name]}]'", name=name
            ) from None
        return False
