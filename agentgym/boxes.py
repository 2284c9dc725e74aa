"""The protocols of boxes, and the result of a program that ran in one."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of hidden tests, case by case."""

    cases: Mapping[str, str | None]
    """By the name of a case: None where it passed, else the reason why not."""
    output: str
    """What the cases printed."""
    result: ExecResult
    """The result of the program that ran the cases."""

    @property
    def passed(self) -> int:
        """The number of cases that passed."""
        return sum(why is None for why in self.cases.values())

    @property
    def total(self) -> int:
        """The number of cases."""
        return len(self.cases)

    @property
    def fraction(self) -> float:
        """The share of the cases that passed, from 0 to 1."""
        return self.passed / self.total

    @property
    def ok(self) -> bool:
        """Whether every case passed."""
        return self.passed == self.total


def cut_middle(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text: its head and tail, with a note of the cut between them."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters cut ...]\n"
    room = max(limit - len(note), 0)
    return (text[: room - room // 2] + note + text[len(text) - room // 2 :])[:limit]


RequestOutcome: TypeAlias = Literal["allowed", "refused", "malformed", "failed", "cut"]
"""What a box's proxy did with a request: "cut" for one that was allowed, and then ended by a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """One request of code in a box to the proxy, as far as it has come."""

    at: float
    """The time of the connection, in seconds since 1970."""
    method: str
    """CONNECT for a tunnel such as https uses; "" where no request could be read."""
    host: str
    port: int
    path: str
    """The path and query of a plain http request."""
    outcome: RequestOutcome
    why: str
    """The reason of every verdict but "allowed"."""
    sent: int
    """Bytes from the box to the host."""
    received: int


class LocalAddress(NamedTuple):
    """An address of this machine that leads to a port inside a box."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The address as the beginning of a URL, without a last slash."""
        return f"http://{self.host}:{self.port}"


class BoxService(Protocol):
    """A container beside a box, in the same private network."""

    async def logs(self, *, lines: int = 200) -> str:
        """Return the last lines of what it wrote since the episode began, at most 64 KiB of them."""
        ...


HostFunction: TypeAlias = Callable[..., object | Awaitable[object]]
"""A function of the host that code in the box may call: it takes and returns plain JSON."""
Expected: TypeAlias = object | Callable[[Any], bool]
"""The right value of a hidden case, or a function of the host that says whether a value is right."""


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

    async def verify(
        self,
        *,
        code: str | None = None,
        command: str | None = None,
        files: Mapping[str, str | bytes] | None = None,
        expect: Mapping[str, Expected] | None = None,
        timeout_s: float = 10.0,
    ) -> Verdict:
        """Run hidden tests over a copy of the working folder, in processes that the episode never touched.

        `code` is Python: each function whose name begins with `test` is a case, in a process of its own. With
        `expect` the cases are expressions instead, and their values are compared on the host, which alone knows the
        right ones. `command` is a command that runs tests: plain commands of Python (a file, `-m unittest`,
        `-m pytest`) count as passed where the tests came to their end; of any other one the exit code counts.
        With `expect` it runs once for each text, given on stdin, and its output is compared on the host.
        `files` are hidden files, by path; they take the place of what could stand in for them. The cases share
        `timeout_s` evenly. Nothing is left in the box. What ends early, by `os._exit(0)` for instance, has failed.
        ValueError names the argument that makes no sense.
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

    def requests(self) -> Sequence[NetworkRequest]:
        """Return every request of this episode to the box's proxy, in order; empty where `network` is no allow-list."""
        ...

    def port(self, port: int, *, timeout_s: float = 10.0) -> AbstractAsyncContextManager[LocalAddress]:
        """Lend an address of this machine that leads to 127.0.0.1:port in the box, once something listens there.

        TimeoutError where nothing listens in time, ValueError where the box has no network of its own.
        """
        ...

    def service(self, name: str) -> BoxService:
        """Return the container of that name beside the box; ValueError where there is none."""
        ...

    async def snapshot(self, path: str | Path, *, limit: int = 1 << 30, timeout_s: float = 120.0) -> None:
        """Write the working folder to a tar file on this machine: exact modes, times, links and sizes.

        Everything else in the box is stopped meanwhile. ValueError over `limit` bytes; no file is written then.
        """
        ...

    async def restore(self, path: str | Path, *, timeout_s: float = 120.0) -> None:
        """Replace the working folder's content by that of a snapshot, which may come from another box.

        ValueError for a file that is no snapshot or leads out of the folder; the folder is empty then.
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
