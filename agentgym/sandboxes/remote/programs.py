"""Calls that run something in a box: commands, cells, programs that go on, and shells."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentgym.errors import BoxKilledError, SandboxError, WireError
from agentgym.sandboxes.protocol import OUTPUT_LIMIT, ExecResult, HostFunction, Lifetime
from agentgym.sandboxes.protocol.arguments import (
    check_cell,
    check_program,
    check_surroundings,
    check_text,
    check_timeout,
)
from agentgym.sandboxes.remote.calls import MARGIN_S, Calls, encoded
from agentgym.sandboxes.remote.commands import KILLED, command_frame, limit_field, parse_result
from agentgym.sandboxes.remote.process import RemoteProcess
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST
from agentgym.sandboxes.remote.wire import Frame

START_S = 30.0


class Programs(Calls):
    """Whatever is run in a session of a box."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 10.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a shell command, or a program and its arguments; see `boxes.Box.exec`.

        Nothing it starts outlives the call. The exit code is 126 where a command cannot start, 127 where there is none.
        """
        check_program(command, cwd, env, stdin)
        body, fields = command_frame(command, cwd, env, stdin)
        return await self._run("exec", body, timeout_s, **fields, **limit_field(output_limit))

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run Python as a REPL cell; see `boxes.Box.python`.

        At most 1000 calls of `functions` are answered in one cell. An async function is awaited while the
        box waits; a plain one runs in the event loop and holds it up. An error of theirs is raised in the
        code as RuntimeError; errors of infrastructure (`SandboxError`, `EngineError`) end the call here.
        """
        check_cell(code, functions or {}, fresh)
        return await self._cell(code, timeout_s, functions or {}, fresh=fresh, **limit_field(output_limit))

    async def _cell(
        self, code: str, timeout_s: float, functions: Mapping[str, HostFunction], *, hides: bool = False, **fields: Any
    ) -> ExecResult:
        """Run a cell; one that `hides` is given the entrance of a folder that only it can write to."""
        fields |= {"functions": sorted(functions), "hides": hides}
        return await self._run("python", encoded(code, "code"), timeout_s, dict(functions), **fields)

    @asynccontextmanager
    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = START_S,
    ) -> AsyncIterator[RemoteProcess]:
        """Start a program that goes on beside other calls, until the block ends; see `boxes.Box.start`.

        ValueError where 64 programs and shells run in the box.
        """
        check_program(command, cwd, env, None)
        body, fields = command_frame(command, cwd, env)
        async with self._process(body, timeout_s, fields) as process:
            yield process

    @asynccontextmanager
    async def _process(self, body: bytes, timeout_s: float, fields: Mapping[str, Any]) -> AsyncIterator[RemoteProcess]:
        check_timeout(timeout_s)  # Before there is anything to be ended.
        process = RemoteProcess(self.link, self.lifetime)
        try:
            await self._call("start", body, timeout_s, process=process.number, **fields)
            yield process
        finally:
            await process.close(timeout_s)

    @asynccontextmanager
    async def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = START_S
    ) -> AsyncIterator["RemoteShell"]:
        """Open a shell whose state stays from run to run, until the block ends; see `boxes.Box.shell`.

        ValueError where 64 programs and shells run in the box, or the shell does not begin.
        """
        check_timeout(timeout_s)
        check_surroundings(cwd, env)
        body, fields = command_frame(None, cwd, env)
        number = self.link.new_number()
        shell = RemoteShell(self, number)
        try:
            await self._call("shell", body, timeout_s, shell=number, **fields)
            yield shell
        finally:
            if not shell.lifetime.is_over:
                shell.lifetime.end("its block ended")
                await self.link.finish("end_shell", timeout_s + MARGIN_S, shell=number)

    async def _run(
        self, op: str, body: bytes, timeout_s: float, serve: Mapping[str, HostFunction] | None = None, **fields: Any
    ) -> ExecResult:
        """Run something to its end; where it ends the whole box, that is its result."""
        try:
            return self._result(await self._call(op, body, timeout_s, serve, **fields))
        except BoxKilledError:
            return KILLED

    def _result(self, frame: Frame) -> ExecResult:
        """Return the result in an answer; a box whose answer makes no sense is cut."""
        try:
            result = parse_result(frame)
        except (KeyError, TypeError, WireError) as error:
            self.link.cut("it was closed")
            raise SandboxError(f"{SANDBOX_LOST}: the box gave an answer that makes no sense: {error!r}") from error
        self.link.needs_replacement |= result.status in ("oom", "protocol")
        return result


class RemoteShell:
    """A shell in a session of a box; implements `boxes.BoxShell`."""

    def __init__(self, box: Programs, number: int) -> None:
        self._box, self._number = box, number
        self.lifetime = Lifetime("the shell", box.lifetime)

    async def run(self, command: str, *, timeout_s: float = 10.0, output_limit: int = OUTPUT_LIMIT) -> ExecResult:
        """Run a command in the shell; see `boxes.BoxShell.run`."""
        check_text("command", command)
        body = encoded(command, "command")
        fields = {"shell": self._number, **limit_field(output_limit)}
        with self.lifetime.call():
            return await self._box._run("run", body, timeout_s, **fields)
