"""The host side of a box: never imports environments or rollouts."""

from typing import Literal, TypeAlias

from agentgym.errors import SandboxError
from agentgym.sandboxes.local import Bubblewrap, Process, why_no_bubblewrap
from agentgym.types import Sandbox

Kind: TypeAlias = Literal["auto", "docker", "bubblewrap", "unsafe"]

__all__ = ["Bubblewrap", "Kind", "Process", "named"]


def named(kind: Kind) -> Sandbox:
    """The sandbox of that name with its defaults."""
    if kind == "unsafe":
        return Process(unsafe=True)
    return Bubblewrap()
