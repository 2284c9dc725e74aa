"""Programs in a sandbox: the protocols of those that run, and the results of those that ran."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Literal, Protocol, TypeAlias

OUTPUT_LIMIT = 64 << 10
"""Bytes of each stream of a program that a result keeps, where the call does not say how many."""
Status: TypeAlias = Literal["ok", "error", "timeout", "oom", "killed", "output_limit", "protocol", "sandbox_killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a program in a sandbox. A program that fails is a result; a sandbox that is lost raises
    SandboxError."""

    status: Status
    exit_code: int
    """The exit code: 0 for success, 1 for an exception in Python, minus the signal's number for a killed program."""
    stdout: str
    stderr: str
    truncated: bool = False
    """Whether the output was cut in the middle; its head and tail are kept."""
    state_lost: bool = False
    """Whether the Python namespace of the sandbox, or the shell, was lost and started anew."""
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
    """What the cases printed, one after the other; of each the begin, 1 MiB in all, and how much was cut."""
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


class SandboxStream(Protocol):
    """An output of a program that runs: `async for piece in process.stdout`."""

    async def read(self, size: int = 1 << 16, *, timeout_s: float | None = None) -> bytes:
        """Return at most `size` bytes as soon as there are any, b"" at the end; TimeoutError after `timeout_s`."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class SandboxProcess(Protocol):
    """A program that goes on beside other calls. It waits where nobody reads what it writes, 256 KiB ahead.

    SandboxError where its sandbox, or its branch, has ended.
    """

    @property
    def stdout(self) -> SandboxStream:
        """What it writes to its standard output."""
        ...

    @property
    def stderr(self) -> SandboxStream:
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


class SandboxShell(Protocol):
    """A shell whose state stays from run to run."""

    async def run(self, command: str, *, timeout_s: float = 10.0, output_limit: int = OUTPUT_LIMIT) -> ExecResult:
        """Run a command in the shell, as a file that it reads; jobs that it leaves running go on.

        At the time limit it is interrupted, as by ctrl-C, and the state stays; where that does not end it, and where it
        ends the shell, the next run meets a new shell, and `state_lost` says so. What it says of a run is the shell's
        word, which earlier runs can have changed: no proof for a reward.
        """
        ...
