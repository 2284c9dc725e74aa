"""Optional packages, and the agentgym extra that installs each of them."""

import json
import shlex
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import lazy_loader

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
    "gguf": "gguf",
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
    "reasoning_gym": "reasoning",
    "datasets": "trl",
    "matplotlib": "report",
    "starlette": "view",
    "uvicorn": "view",
}
"""The extra that installs each package, by import name."""


DISTRIBUTION = "agentgym-kit"
"""The package's name on PyPI, where `agentgym` is another project."""
CHECKOUT = Path(__file__).parents[2]
"""The folder that contains the package `agentgym`: a checkout, unless agentgym is installed."""


def install_line(extra: str) -> str:
    """Return the command that adds an extra to this installation.

    It names the folder or wheel that agentgym was installed from, or the checkout that is used without an
    installation, or else the distribution on PyPI.
    """
    return f"pip install {shlex.quote(f'{_source() or DISTRIBUTION}[{extra}]')}"


def _source() -> Path | None:
    """Return the folder or wheel that agentgym was installed from (PEP 610), or the checkout if it isn't installed.

    None means that it was installed from an index, or that the folder or wheel is gone.
    """
    try:
        said = distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlsplit(json.loads(said)["url"]) if said else None
    except PackageNotFoundError:
        return CHECKOUT if (CHECKOUT / "pyproject.toml").is_file() else None
    except (ValueError, KeyError, TypeError):
        return None
    path = Path(unquote(url.path)) if url is not None and url.scheme == "file" else None
    return path if path is not None and path.exists() else None


class MissingPackage(AgentGymError, ImportError):
    """An optional package isn't installed; the message has the command that installs it."""


class needs_extra:
    """Context manager that turns an optional package's failed import into MissingPackage.

    All other exceptions propagate unchanged.
    """

    def __enter__(self) -> None:
        """Do nothing; exceptions are converted when the `with` block ends."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in EXTRAS:
            raise MissingPackage(f"{name} is not installed: {install_line(EXTRAS[name])}", name=name) from None
        return False


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are listed in its `__init__.pyi`.

    A module is imported when one of its names is first used; if it needs an optional package that isn't installed,
    the error says how to install it.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`, which has the `.pyi` next to it.
    """
    load, listed, names = lazy_loader.attach_stub(package, file)

    def loaded(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needs_extra():
            return load(name)

    return loaded, listed, names
