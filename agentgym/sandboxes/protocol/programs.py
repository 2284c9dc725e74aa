"""Programs in a sandbox: interfaces of running programs, and results of finished ones."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Literal, Protocol, TypeAlias

OUTPUT_LIMIT = 64 << 10
"""Default maximum bytes of each output stream in a result."""
Status: TypeAlias = Literal["ok", "error", "timeout", "oom", "killed", "output_limit", "protocol", "sandbox_killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a program in a sandbox.

    A program that fails still returns a result; only a lost sandbox raises SandboxError.
    """

    status: Status
    exit_code: int
    """The exit code: 0 for success, 1 for an exception in Python, the negative signal number for a killed program."""
    stdout: str
    stderr: str
    truncated: bool = False
    """Whether the output was cut in the middle, so that only its head and tail are left."""
    state_lost: bool = False
    """Whether the sandbox's Python namespace, or the shell, was lost and replaced with a new one."""
    seconds: float = 0.0
    raw: tuple[bytes, bytes] | None = field(default=None, repr=False)
    """The raw bytes of stdout and stderr if they are not both UTF-8; None if the texts are exact."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status == "ok" and self.exit_code == 0

    @property
    def stdout_bytes(self) -> bytes:
        """The exact bytes of stdout; `stdout` has replacement characters in place of invalid UTF-8."""
        return self.stdout.encode("utf-8", "surrogatepass") if self.raw is None else self.raw[0]

    @property
    def stderr_bytes(self) -> bytes:
        """The exact bytes of stderr; `stderr` has replacement characters in place of invalid UTF-8."""
        return self.stderr.encode("utf-8", "surrogatepass") if self.raw is None else self.raw[1]

    def text(self, limit: int = 8192) -> str:
        """Return stdout, stderr and the reason for a failure as one text for a model.

        Args:
            limit: Maximum number of characters; a longer text is cut in the middle.
        """
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
    """Maps each case's name to None if it passed, or to the reason for its failure."""
    output: str
    """Output of the cases, one after another, at most 1,048,576 characters in all.

    Only the beginning of each case's output is included, with a note of how much was cut.
    """
    result: ExecResult
    """The result of the program that ran the cases."""

    @property
    def passed(self) -> int:
        """Number of cases that passed."""
        return sum(why is None for why in self.cases.values())

    @property
    def total(self) -> int:
        """Number of cases."""
        return len(self.cases)

    @property
    def fraction(self) -> float:
        """Fraction of the cases that passed, from 0 to 1."""
        return self.passed / self.total

    @property
    def ok(self) -> bool:
        """Whether every case passed."""
        return self.passed == self.total


def cut_middle(text: str, limit: int) -> str:
    """Return the text cut to at most `limit` characters: its head and tail, with a note about the cut between them."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters cut ...]\n"
    room = max(limit - len(note), 0)
    return (text[: room - room // 2] + note + text[len(text) - room // 2 :])[:limit]


class SandboxStream(Protocol):
    """An output stream of a running program: `async for piece in process.stdout`."""

    async def read(self, size: int = 1 << 16, *, timeout_s: float | None = None) -> bytes:
        """Return the next bytes as soon as there are any, or b"" at the end of the stream.

        Args:
            size: Maximum number of bytes.
            timeout_s: Time limit in seconds; None means no limit.

        Raises:
            TimeoutError: If nothing arrives within `timeout_s`.
        """
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class SandboxProcess(Protocol):
    """A program in a sandbox that runs alongside other calls.

    The program blocks once 256 KiB of its output are unread. Its methods raise SandboxError if its sandbox, or its
    branch, has ended.
    """

    @property
    def stdout(self) -> SandboxStream:
        """The program's standard output."""
        ...

    @property
    def stderr(self) -> SandboxStream:
        """The program's standard error, which must be read, too, so that the program doesn't block."""
        ...

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of the signal that killed the program; None while it runs."""
        ...

    async def write(self, data: str | bytes, *, timeout_s: float | None = None) -> None:
        """Write to the program's standard input, as fast as the program reads it.

        Args:
            data: The input; text is encoded as UTF-8.
            timeout_s: Time limit in seconds; None means no limit.

        Raises:
            BrokenPipeError: If the program accepts no more input.
            TimeoutError: If the program doesn't read the input within `timeout_s`.
        """
        ...

    async def close_stdin(self) -> None:
        """Close the program's standard input after everything that was written to it."""
        ...

    async def wait(self, *, timeout_s: float | None = None) -> int:
        """Return the exit code as soon as the program has ended.

        Args:
            timeout_s: Time limit in seconds; None means no limit.

        Raises:
            TimeoutError: If the program is still running after `timeout_s`; it keeps running.
        """
        ...

    async def kill(self, number: int = SIGKILL) -> None:
        """Kill the program and everything it started.

        Args:
            number: The signal. Any signal other than SIGKILL goes to the program's process group, as from a terminal.
        """
        ...


class SandboxShell(Protocol):
    """A shell that preserves its state between runs."""

    async def run(self, command: str, *, timeout_s: float = 10.0, output_limit: int = OUTPUT_LIMIT) -> ExecResult:
        """Run a command in the shell, which reads it like a script; jobs left in the background keep running.

        At the time limit, the command is interrupted, as by Ctrl-C, and the shell's state is preserved. If the
        interrupt doesn't end the command, or if the shell ends, the result has `state_lost` set and the next run gets a
        new shell. Don't base a reward on these results: the shell itself reports them, and earlier runs can have
        tampered with it.

        Args:
            command: The command, in the shell's language.
            timeout_s: Time limit in seconds.
            output_limit: Maximum bytes to return of each output stream, from 2 bytes to 16 MiB.
        """
        ...
