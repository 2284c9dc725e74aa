"""Calls that run something in a sandbox: commands, cells, background programs, and shells."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentgym.errors import SandboxError, SandboxKilledError, WireError
from agentgym.sandboxes.protocol import OUTPUT_LIMIT, ExecResult, HostFunction, Lifetime
from agentgym.sandboxes.protocol.arguments import MAX_OUTPUT, Program, check_limit, check_text
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.remote.calls import MARGIN_S, MAX_CODE, Calls, encoded
from agentgym.sandboxes.remote.host_functions import MAX_FILE
from agentgym.sandboxes.remote.process import RemoteProcess
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST
from agentgym.sandboxes.remote.results import KILLED, parse_result
from agentgym.sandboxes.remote.wire import Frame

MAX_PARTS = 20_000


class Programs(Calls):
    """The programs of a sandbox's session."""

    async def _exec(self, program: Program, timeout_s: float, output_limit: int) -> ExecResult:
        body, fields = _frame(program)
        return await self._run("exec", body, timeout_s, output_limit, **fields)

    async def _python(
        self,
        code: str,
        timeout_s: float,
        functions: Mapping[str, HostFunction],
        *,
        fresh: bool,
        output_limit: int = OUTPUT_LIMIT,
        hides: bool = False,
    ) -> ExecResult:
        """Run a cell.

        If `hides`, the cell gets a descriptor of the folder for hidden files, to which only this cell can write. A
        sandbox that is reset in place has no such folder.
        """
        fields = {"functions": sorted(functions), "fresh": fresh, "hides": hides}
        return await self._run("python", encoded(code, "code"), timeout_s, output_limit, functions, **fields)

    @asynccontextmanager
    async def _start(self, program: Program, timeout_s: float) -> AsyncIterator[RemoteProcess]:
        body, fields = _frame(program)
        async with self._process(body, timeout_s, fields) as process:
            yield process

    @asynccontextmanager
    async def _process(self, body: bytes, timeout_s: float, fields: Mapping[str, Any]) -> AsyncIterator[RemoteProcess]:
        process = RemoteProcess(self.link, self.lifetime)
        try:
            await self._call("start", body, timeout_s, process=process.number, **fields)
            yield process
        finally:
            await process.close(timeout_s)

    @asynccontextmanager
    async def _shell(self, program: Program, timeout_s: float) -> AsyncIterator["RemoteShell"]:
        """Open a shell.

        Raises:
            ValueError: If it does not start.
        """
        body, fields = _frame(program)
        number = self.link.new_number()
        shell = RemoteShell(self, number)
        try:
            await self._call("shell", body, timeout_s, shell=number, **fields)
            yield shell
        finally:
            if not shell.lifetime.is_over:
                shell.lifetime.end("its `async with` block ended")
                await self.link.finish("end_shell", timeout_s + MARGIN_S, shell=number)

    async def _run(
        self,
        op: str,
        body: bytes,
        timeout_s: float,
        output_limit: int,
        serve: Mapping[str, HostFunction] | None = None,
        **fields: Any,
    ) -> ExecResult:
        """Run a program to its end; if it ends the whole sandbox, return the KILLED result."""
        if output_limit != OUTPUT_LIMIT:
            fields["keep"] = output_limit
        try:
            return self._result(await self._call(op, body, timeout_s, serve, **fields))
        except SandboxKilledError:
            return KILLED

    def _result(self, frame: Frame) -> ExecResult:
        """Return the result in an answer; a sandbox whose answer is invalid is cut off."""
        try:
            result = parse_result(frame)
        except (KeyError, TypeError, WireError) as error:
            self.link.cut("it was closed")
            raise SandboxError(f"{SANDBOX_LOST}: the sandbox sent an invalid answer: {error!r}") from error
        self.link.needs_replacement |= result.status in ("oom", "protocol")
        return result


class RemoteShell:
    """A shell in a session of a sandbox. Implements `sandboxes.SandboxShell`."""

    def __init__(self, sandbox: Programs, number: int) -> None:
        self._sandbox, self._number = sandbox, number
        self.lifetime = Lifetime("the shell", sandbox.lifetime)

    async def run(self, command: str, *, timeout_s: float = 10.0, output_limit: int = OUTPUT_LIMIT) -> ExecResult:
        """Run a command in the shell; see `sandboxes.SandboxShell.run`."""
        check_text("command", command)
        check_limit("output_limit", output_limit, 2, MAX_OUTPUT)
        body = encoded(command, "command")
        with self.lifetime.call():
            return await self._sandbox._run("run", body, timeout_s, output_limit, shell=self._number)


def _frame(program: Program) -> tuple[bytes, dict[str, Any]]:
    """Return a frame's body, with the program's command, variables and input, and the fields that describe the body.

    Raises:
        ValueError: If a program can't be given these arguments, variables or input.
    """
    command, cwd, env, stdin = program.command, program.cwd, program.env, program.stdin
    if isinstance(command, str) and cwd is None and not env and stdin is None:
        return encoded(command, "command"), {}
    parts = [*_words(command), *(("env", _path(f"{name}={value}")) for name, value in (env or {}).items())]
    if cwd is not None:
        parts.append(("cwd", _path(cwd)))
    if stdin is not None:
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        if len(data) > MAX_FILE:
            raise WrongContent(
                f"stdin: the input has {len(data)} bytes, but the limit is {MAX_FILE}; write a file, or use start()"
            )
        parts.append(("stdin", data))
    if sum(len(part) for kind, part in parts if kind != "stdin") > MAX_CODE:
        raise WrongContent(f"command: it has more than {MAX_CODE} bytes, including its arguments and environment")
    sizes = [(kind, len(part)) for kind, part in parts]
    if len(sizes) > MAX_PARTS:
        raise WrongContent(f"command: it has more than {MAX_PARTS} arguments and variables")
    return b"".join(part for _, part in parts), {"parts": sizes}


def _words(command: str | Sequence[str] | None) -> list[tuple[str, bytes]]:
    if command is None:
        return []
    if isinstance(command, str):
        return [("shell", encoded(command, "command"))]
    return [("word", _path(word)) for word in command]


def _path(text: str) -> bytes:
    """Return the bytes of a text that may be a file name.

    For a name that is not UTF-8, as `list` and `get` return it, these are the bytes of the file's real name.
    """
    return text.encode("utf-8", "surrogateescape" if _is_escaped(text) else "surrogatepass")


def _is_escaped(text: str) -> bool:
    return all("\udc80" <= letter <= "\udcff" for letter in text if "\ud800" <= letter <= "\udfff")
