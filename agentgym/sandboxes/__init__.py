"""The host side of a box: which sandboxes there are, and the best one that runs here.

Never imports environments or rollouts: an environment is handed its box.
"""

from typing import Literal, TypeAlias, assert_never

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker import Docker, why_no_docker
from agentgym.sandboxes.local import Bubblewrap, Process, why_no_bubblewrap
from agentgym.types import Sandbox

Kind: TypeAlias = Literal["auto", "docker", "bubblewrap", "unsafe"]

__all__ = ["Bubblewrap", "Docker", "Kind", "Process", "auto", "named"]


def auto() -> Sandbox:
    """The strongest sandbox that runs here, never an unsafe one; SandboxError that says what each one lacks."""
    no_docker = why_no_docker()
    if no_docker is None:
        return Docker()
    no_bubblewrap = why_no_bubblewrap()
    if no_bubblewrap is None:
        return Bubblewrap()
    raise SandboxError(
        f"no sandbox runs here. Docker: {no_docker}. Bubblewrap: {no_bubblewrap}. "
        "Code that you trust can run without one: named('unsafe')."
    )


def named(kind: Kind) -> Sandbox:
    """The sandbox of that name with its defaults; whether it runs here shows when it is opened."""
    match kind:
        case "auto":
            return auto()
        case "docker":
            return Docker()
        case "bubblewrap":
            return Bubblewrap()
        case "unsafe":
            return Process(unsafe=True)
        case _:
            assert_never(kind)
