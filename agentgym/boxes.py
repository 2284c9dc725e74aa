"""The protocols of boxes, and the result of a program that ran in one."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

Status: TypeAlias = Literal["ok", "error", "timeout", "oom", "killed", "output_limit", "protocol", "box_killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a program in a box. A program that fails is a result; a box that is lost raises SandboxError."""

    status: Status
    exit_code: int
    """The exit code: 0 for success, 1 for an exception in Python, minus the signal's number for a killed program."""
    stdout: str
    stderr: str
    truncated: bool = False
    """Whether the output was cut in the middle; its head and tail are kept."""
    state_lost: bool = False
    """Whether the Python namespace of the box was lost and started anew."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status == "ok" and self.exit_code == 0

    @property
    def timed_out(self) -> bool:
        """Whether the time limit ended the program."""
        return self.status == "timeout"

    def text(self, limit: int = 8192) -> str:
        """Return stdout, stderr and the reason of a failure as one text of at most `limit` characters, for a model."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.status not in ("ok", "error"):
            parts.append(f"[{self.status} after {self.seconds:.1f} s]")
        if self.state_lost:
            parts.append("[the Python state was lost]")
        text = "\n".join(part for part in parts if part)
        if not text and self.exit_code:
            text = f"[exit code {self.exit_code}]"
        return cut_middle(text, limit)


def cut_middle(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text: its head and tail, with a note of the cut between them."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters cut ...]\n"
    room = max(limit - len(note), 0)
    return (text[: room - room // 2] + note + text[len(text) - room // 2 :])[:limit]


HostFunction: TypeAlias = Callable[..., object | Awaitable[object]]
"""A function of the host that code in the box may call: it takes and returns plain JSON."""


class Box(Protocol):
    """One leased sandbox: files, a shell and a stateful Python, all under limits.

    A program that fails is a result; a box that died raises SandboxError. Relative paths start at the
    box's working folder, which is also the folder programs start in.
    """

    @property
    def digest(self) -> str:
        """The image digest that the box was made from, or the kind of the box."""
        ...

    async def exec(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run a shell command in a process of its own; nothing it starts outlives the call's time limit."""
        ...

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
    ) -> ExecResult:
        """Run Python as a REPL cell: names persist from call to call, a last expression is printed by repr.

        `functions` are callable from the code by name and run on the host, in this event loop: the way to
        give code access to a secret or a counter without putting it into the box. `fresh` runs in a new
        namespace and process that the earlier code never touched, for verifiers; the session goes on after it.
        """
        ...

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = 30.0) -> None:
        """Write whole files by path, making folders; no link is followed out of the box."""
        ...

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> bytes:
        """Return the file's bytes; FileNotFoundError where there is none, ValueError where it is over `limit` bytes."""
        ...

    async def list(self, path: str = ".", *, timeout_s: float = 30.0) -> list[str]:
        """Return the sorted names in a folder, those of folders with a trailing slash."""
        ...

    async def put(self, source: str | Path, target: str = ".", *, timeout_s: float = 30.0) -> None:
        """Copy a file of this machine to `target`, or what is in a folder into the folder `target`."""
        ...

    async def get(
        self, source: str, target: str | Path, *, limit: int = 64 << 20, timeout_s: float = 30.0
    ) -> Sequence[str]:
        """Copy a file of the box to `target`, or what is in a folder into the folder `target`.

        Links, pipes and devices are left out; their names are the answer. ValueError over `limit` bytes in all.
        """
        ...

    async def fork(self, *, timeout_s: float = 30.0) -> "Branch":
        """Return a branch that goes on from here, with the same names in memory and a copy of the working folder.

        From now on neither meets what the other does. A branch ends when it is closed, and with its box's episode.
        """
        ...

    async def reset(self, *, timeout_s: float = 10.0) -> None:
        """Bring the box back to the state of a new one: no process, file, name or branch is left."""
        ...


class Branch(Box, Protocol):
    """A forked box: `async with await box.fork() as branch`."""

    async def close(self) -> None:
        """End the branch, its processes and its files; closing twice is harmless."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Boxes(Protocol):
    """An open pool of boxes."""

    def lease(self) -> AbstractAsyncContextManager[Box]:
        """Lease a clean box for one rollout: wait for a free one, and take it back at the end, also on cancellation."""
        ...


class Sandbox(Protocol):
    """The boxes that an environment needs, as it declares them."""

    def open(self, size: int) -> AbstractAsyncContextManager[Boxes]:
        """Open a pool that leases at most `size` boxes at once and leaves nothing behind when it closes."""
        ...
