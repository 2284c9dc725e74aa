"""Programs, shells and cells of fake sandboxes: a program has already ended with its result, but a cell really runs."""

import ast
import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from signal import SIGKILL
from typing import Any

from agentgym.sandboxes.protocol import OUTPUT_LIMIT, ExecResult, HostFunction, Sandbox
from agentgym.sandboxes.protocol.arguments import check_data, check_limit, check_patience, check_text, check_timeout


class FakeStream:
    """Output of a program that has already ended. Implements `sandboxes.SandboxStream`."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    async def read(self, size: int = 1 << 16, *, timeout_s: float | None = None) -> bytes:
        """Return the next bytes, at most `size`, or b"" at the end."""
        check_limit("size", size, 1)
        check_patience(timeout_s)
        piece, self.left = self.left[:size], self.left[size:]
        return piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the remaining bytes."""
        while piece := await self.read():
            yield piece


class FakeProcess:
    """A program that has already ended with the given result. Implements `sandboxes.SandboxProcess`.

    `input` contains the bytes that were written to the program's standard input.
    """

    def __init__(self, answer: ExecResult) -> None:
        self.stdout, self.stderr = FakeStream(answer.stdout_bytes), FakeStream(answer.stderr_bytes)
        self.exit_code: int | None = answer.exit_code
        self.input = b""

    async def write(self, data: str | bytes, *, timeout_s: float | None = None) -> None:
        """Append the bytes to `input`."""
        check_data("data", data)
        check_patience(timeout_s)
        self.input += data.encode() if isinstance(data, str) else data

    async def close_stdin(self) -> None:
        """Do nothing: the program reads no input."""

    async def wait(self, *, timeout_s: float | None = None) -> int:
        """Return the program's exit code."""
        check_patience(timeout_s)
        assert self.exit_code is not None
        return self.exit_code

    async def kill(self, number: int = SIGKILL) -> None:
        """Do nothing: the program has already ended."""


class FakeShell:
    """A shell whose commands the fake sandbox answers. Implements `sandboxes.SandboxShell`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def run(self, command: str, *, timeout_s: float = 10.0, output_limit: int = OUTPUT_LIMIT) -> ExecResult:
        """Return the sandbox's result for the command."""
        check_text("command", command)
        check_timeout(timeout_s)
        return await self.sandbox.exec(command)


def blocking(function: HostFunction, loop: asyncio.AbstractEventLoop) -> Callable[..., object]:
    """Wrap a host function for another thread: a call runs the function in `loop`, and waits for its result."""

    async def answer(*args: Any, **kwargs: Any) -> object:
        value = function(*args, **kwargs)
        return await value if isinstance(value, Awaitable) else value

    return lambda *args, **kwargs: asyncio.run_coroutine_threadsafe(answer(*args, **kwargs), loop).result()


def run_cell(code: str, namespace: dict[str, Any]) -> ExecResult:
    """Run a Python cell for real and return its printed text as the result's stdout."""
    printed: list[str] = []
    namespace["print"] = lambda *values, sep=" ", end="\n", **_: printed.append(sep.join(map(str, values)) + end)
    error = ""
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            printed += [] if value is None else [f"{value!r}\n"]
    except (Exception, SystemExit):
        error = traceback.format_exc(limit=-1)
    status = "error" if error else "ok"
    return ExecResult(status=status, exit_code=int(bool(error)), stdout="".join(printed), stderr=error)  # type: ignore[arg-type]
