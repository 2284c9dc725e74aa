"""The protocols of boxes, and the result of a program that ran in one."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

OUTPUT_LIMIT = 64 << 10
"""Bytes of each stream of a program that a result keeps, where the call does not say how many."""
FILE_LIMIT = 64 << 20
"""Bytes that `get` and `archive` take out of a box, where the call does not say how many."""
Status: TypeAlias = Literal["ok", "error", "timeout", "oom", "killed", "output_limit", "protocol"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a program in a box. A program that fails is a result; a box that dies raises SandboxError."""

    status: Status
    exit_code: int
    """The exit code: 0 for success, 1 for an exception in Python, minus the signal's number for a killed program."""
    stdout: str
    stderr: str
    truncated: bool = False
    """Whether the output was cut in the middle; its head and tail are kept."""
    state_lost: bool = False
    """Whether the Python namespace of the box, or the shell, was lost and started anew."""
    seconds: float = 0.0
    raw: tuple[bytes, bytes] | None = field(default=None, repr=False)
    """Both streams as they were written, where they are not UTF-8; None where the texts say all."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status == "ok" and self.exit_code == 0

    @property
    def stdout_bytes(self) -> bytes:
        """The exact bytes of stdout; `stdout` has the replacement character for what is not UTF-8."""
        return self.stdout.encode("utf-8", "surrogatepass") if self.raw is None else self.raw[0]

    @property
    def stderr_bytes(self) -> bytes:
        """The exact bytes of stderr; `stderr` has the replacement character for what is not UTF-8."""
        return self.stderr.encode("utf-8", "surrogatepass") if self.raw is None else self.raw[1]

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


Progress: TypeAlias = Callable[[int], object]
"""Called with the number of bytes that were copied so far."""


class Box(Protocol):
    """One leased sandbox: files, a shell and a stateful Python, all under limits.

    A program that fails is a result; a box that died raises SandboxError. Relative paths start at the
    box's working folder, which is also the folder programs start in.
    """

    @property
    def digest(self) -> str:
        """The image digest that the box was made from, or the kind of the box."""
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 10.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a shell command, or a program and its arguments, in a process of its own; it ends with the call.

        It starts in `cwd`, with `env` beside the box's own environment, and reads `stdin`, which is empty without it.
        Of each stream the first and the last bytes are kept, `output_limit` (2 to 16 MiB) in all. `user` is for boxes
        with several users: ValueError where every program runs as the one user of the box.
        """
        ...

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> "AbstractAsyncContextManager[BoxProcess]":
        """Start a program that goes on beside other calls: `async with box.start("./serve") as process`.

        It ends with the block, and all that it started with it; `timeout_s` is for its start and its end.
        """
        ...

    def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 30.0
    ) -> "AbstractAsyncContextManager[BoxShell]":
        """Open a shell whose folder, variables and functions stay from run to run: `async with box.shell() as shell`.

        It ends with the block, and all that it started with it; `timeout_s` is for its start and its end.
        """
        ...

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run Python as a REPL cell: names persist from call to call, a last expression is printed by repr.

        `functions` are callable from the code by name and run on the host, in this event loop: the way to
        give code access to a secret or a counter without putting it into the box. `fresh` runs in a new
        namespace and process that the earlier code never touched, for verifiers; the session goes on after it.
        """
        ...

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = 30.0) -> None:
        """Write whole files of any size by path, making folders; no link is followed.

        ValueError for a path that is a link, a folder, or leads out of the working folder, and where the box cannot
        write it, such as for a full disk; the latter is also an OSError with the kernel's number.
        """
        ...

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> bytes:
        """Return the file's bytes; FileNotFoundError where there is none, ValueError where it is over `limit` bytes.

        Also ValueError for a link, a folder, a pipe, a path that leads out, and a file that cannot be read; the last is
        also an OSError with the kernel's number.
        """
        ...

    async def list(self, path: str = ".", *, timeout_s: float = 30.0) -> list[str]:
        """Return the sorted names in a folder, those of folders with a trailing slash.

        FileNotFoundError where there is none; ValueError for a path that leads out, and for what is no folder.
        """
        ...

    async def put(
        self,
        source: str | Path,
        target: str = ".",
        *,
        timeout_s: float = 30.0,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file of this machine to `target`, or what is in a folder into the folder `target`, of any size."""
        ...

    async def get(
        self,
        source: str,
        target: str | Path,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = 30.0,
        progress: Progress | None = None,
    ) -> Sequence[str]:
        """Copy a file of the box to `target`, or what is in a folder into the folder `target`.

        Links, pipes and devices are left out; their names are the answer. ValueError over `limit` bytes in all, and
        nothing is written then.
        """
        ...

    async def archive(
        self,
        path: str = ".",
        target: str | Path | None = None,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = 30.0,
    ) -> bytes:
        """Return a file, or what is in a folder, as a tar archive; with `target` it is written there and b"" returned.

        Links are in it as links; pipes, sockets and devices are left out. ValueError over `limit` bytes of archive.
        """
        ...

    async def unpack(self, archive: bytes | str | Path, path: str = ".", *, timeout_s: float = 30.0) -> None:
        """Make the files, folders and links of a tar archive, compressed or not, below the folder `path`.

        The archive is its bytes, or a file of this machine. ValueError for what is none, and for a name that leads out;
        what came before that name is made.
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


class BoxStream(Protocol):
    """An output of a program that runs: `async for piece in process.stdout`."""

    async def read(self, size: int = 1 << 16, *, timeout_s: float | None = None) -> bytes:
        """Return at most `size` bytes as soon as there are any, b"" at the end; TimeoutError after `timeout_s`."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class BoxProcess(Protocol):
    """A program that goes on beside other calls. It waits where nobody reads what it writes, 256 KiB ahead.

    SandboxError where its box, or its branch, has ended.
    """

    @property
    def stdout(self) -> BoxStream:
        """What it writes to its standard output."""
        ...

    @property
    def stderr(self) -> BoxStream:
        """What it writes to its standard error, which has to be read too."""
        ...

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs."""
        ...

    async def write(self, data: str | bytes, *, timeout_s: float | None = None) -> None:
        """Hand bytes to its standard input, as fast as it takes them; BrokenPipeError where it takes no more."""
        ...

    async def close_stdin(self) -> None:
        """End its standard input behind all that was written."""
        ...

    async def wait(self, *, timeout_s: float | None = None) -> int:
        """Return its exit code as soon as it has ended; TimeoutError after `timeout_s`, and it goes on."""
        ...

    async def kill(self, number: int = SIGKILL) -> None:
        """Kill it and all that it started; another signal goes to its process group, as from a terminal."""
        ...


class BoxShell(Protocol):
    """A shell whose state stays from run to run."""

    async def run(self, command: str, *, timeout_s: float = 10.0, output_limit: int = OUTPUT_LIMIT) -> ExecResult:
        """Run a command in the shell, as a file that it reads; jobs that it leaves running go on.

        At the time limit it is interrupted, as by ctrl-C, and the state stays; where that does not end it, and where it
        ends the shell, the next run meets a new shell, and `state_lost` says so.
        """
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
