"""What a payload is: code, and what is right for it."""

from dataclasses import dataclass, field
from typing import Literal

from agentgym.sandboxes.protocol import Status

Group = Literal["exhaustion", "escape", "forgery", "persistence", "files"]
ISOLATED = frozenset({"bubblewrap", "docker", "runsc"})
"""The kinds of sandbox that hold against intent."""
ANYWHERE = ISOLATED | {"unsafe"}
BUT_GVISOR = frozenset({"unsafe", "bubblewrap", "docker"})
"""Where gVisor's kernel ends the whole sandbox, or lets code in it touch process 1: see sandbox/README.md."""
ENDED: tuple[Status, ...] = ("ok", "error")
"""How a program may end that was left alone."""


@dataclass(frozen=True, kw_only=True)
class FileCall:
    """A file call of the host, made after the code has run; it raises one of `raises`, or returns."""

    op: Literal["read", "write", "list"]
    path: str
    raises: tuple[type[Exception], ...] = ()
    match: str = ""
    may_return: bool = False
    """Whether it may return as well, as where the sandbox changes the file meanwhile."""
    content: bytes = b"x"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Code, and what is right for it. CANARY in the code stands for a file of the host."""

    name: str
    group: Group
    code: str = ""
    right: tuple[Status, ...]
    lost: bool | None = None
    """Whether the session is lost; None where either is right."""
    following: tuple[Status, ...] = ("ok",)
    """What the next cell may report: a session that lied about its end may cost the next one, and no more."""
    honest: bool = True
    """Whether the session's own answers can still be right after it: it may lie about itself, and only that."""
    shell: bool = False
    timeout_s: float = 10.0
    functions: bool = False
    """Whether a host function `f` is offered."""
    calls: tuple[FileCall, ...] = field(default=())
    kinds: frozenset[str] = ANYWHERE
