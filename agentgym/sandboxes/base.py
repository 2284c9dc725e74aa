"""One box over a wire: the same calls whatever the box is made of."""

import asyncio
import itertools
import json
import keyword
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from inspect import isawaitable
from typing import Any, get_args

from agentgym.errors import AgentGymError, SandboxError, ToolError, WireError
from agentgym.sandboxes.wire import Frame, Wire
from agentgym.types import ExecResult, HostFunction, Status

PROTOCOL = 1
MARGIN_S = 3.0
"""How much longer than the call's own limit the host waits before it gives the box up."""
FILES_S = 30.0
RESET_S = 10.0
START_S = 30.0
MAX_CODE = 1 << 20
MAX_FILE = 16 << 20
MAX_BATCH = 200
MAX_ASKS = 1000
STATUSES = frozenset(get_args(Status))

_serving: ContextVar[frozenset[int]] = ContextVar("_serving", default=frozenset())
"""The boxes whose code waits for the host function that runs now."""


class RemoteBox:
    """One box at the other end of a wire; implements `types.Box`.

    One call at a time: others wait for their turn. A cancelled call is ended inside the box too.
    """

    def __init__(self, wire: Wire, *, digest: str, end: Callable[[], Awaitable[None]]) -> None:
        self._wire = wire
        self._digest = digest
        self._end = end
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self.broken: str | None = None
        """Why no call can be answered any more; None while it works."""
        self.worn = False
        """It still works, but went through something after which a new box is the safer one."""

    @classmethod
    async def open(cls, wire: Wire, *, digest: str, end: Callable[[], Awaitable[None]]) -> "RemoteBox":
        """Wait for the server's first word; SandboxError where it is not the one expected."""
        try:
            frame = await wire.receive(asyncio.get_running_loop().time() + START_S)
        except (WireError, TimeoutError) as error:
            raise SandboxError(f"the box did not start: {error}") from error
        if frame.envelope.get("hello") != PROTOCOL:
            raise SandboxError(f"the box speaks another protocol than {PROTOCOL}; build its image again")
        return cls(wire, digest=f"{digest}+python{frame.envelope.get('python')}", end=end)

    @property
    def digest(self) -> str:
        """What the box was made from: the image's digest or the kind of the box, and the Python inside."""
        return self._digest

    async def exec(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run a shell command in a process of its own; nothing it starts outlives the call."""
        body = _text(command, "command")
        return _result(await self._program("exec", body, timeout_s, {}), self)

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
    ) -> ExecResult:
        """Run Python as a REPL cell; see `types.Box.python`.

        At most 1000 calls of `functions` are answered in one cell. An async function is awaited while the
        box waits; a plain one runs in the event loop and holds it up. An error of theirs is raised in the
        code as RuntimeError; errors of infrastructure (`SandboxError`, `EngineError`) end the call here.
        """
        functions = dict(functions or {})
        for name in functions:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"functions: {name!r} is not a name")
        body = _text(code, "code")
        frame = await self._program("python", body, timeout_s, functions, functions=sorted(functions), fresh=fresh)
        return _result(frame, self)

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write whole files of at most 16 MiB by path, making folders; no link is followed.

        ValueError for a path that leads out of the working folder; OSError where the box cannot, such as a full disk.
        """
        for names, body in _batches(files):
            await self._call("write", body, FILES_S, files=names)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """The file's bytes; FileNotFoundError where there is none, ValueError where it is over `limit` bytes.

        Also ValueError for a link, a pipe, a path that leads out, and a `limit` over 16 MiB.
        """
        if not 0 <= limit <= MAX_FILE:
            raise ValueError(f"limit: {limit} is not within 0..{MAX_FILE}")
        return (await self._call("read", b"", FILES_S, path=path, limit=limit)).body

    async def list(self, path: str = ".") -> list[str]:
        """Sorted names in a folder, folders with a trailing slash."""
        body = (await self._call("list", b"", FILES_S, path=path)).body
        return [name.decode("utf-8", "replace") for name in body.split(b"\0")] if body else []

    async def reset(self) -> None:
        """Back to the state of a new box, verified; SandboxError, and a broken box, where something is left."""
        frame = await self._call("reset", b"", RESET_S)
        if frame.envelope.get("clean") is not True:
            self._break("something of the last episode could not be removed")
            raise SandboxError(f"the box: {self.broken}")

    def cut(self) -> None:
        """Cut the wire at once, without waiting; the box then ends by itself."""
        self._break("it was closed")

    async def close(self) -> None:
        """End the box and everything in it; it may be called twice."""
        self.cut()
        await self._end()

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        self._wire.close()

    async def _program(
        self, op: str, body: bytes, timeout_s: float, serve: Mapping[str, HostFunction], **fields: object
    ) -> Frame:
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s: {timeout_s} is not a positive number of seconds")
        return await self._call(op, body, timeout_s + MARGIN_S, serve, timeout_s=timeout_s, **fields)

    async def _call(
        self, op: str, body: bytes, patience_s: float, serve: Mapping[str, HostFunction] | None = None, **fields: object
    ) -> Frame:
        """One call and its answer; SandboxError where the box does not give one."""
        if id(self) in _serving.get():
            raise RuntimeError("a host function cannot call the box whose code waits for it")
        async with self._lock:
            if self.broken:
                raise SandboxError(f"the box: {self.broken}")
            call = next(self._ids)
            try:
                self._wire.send({"id": call, "op": op, **fields}, body)
                frame = await self._answer(call, asyncio.get_running_loop().time() + patience_s, serve or {})
            except (WireError, TimeoutError) as error:
                self._break(str(error))
                raise SandboxError(f"the box: {error}") from error
            except BaseException:
                # The call goes on in there: end it. Its answer is passed over by the next call.
                with suppress(WireError):
                    self._wire.send({"id": call, "op": "cancel"})
                raise
        _raise_refusal(frame.envelope, fields)
        return frame

    async def _answer(self, call: int, deadline: float, serve: Mapping[str, HostFunction]) -> Frame:
        """The frame that ends the call; questions that come before it are answered."""
        asked = 0
        frame = await self._next(call, deadline)
        while "ask" in frame.envelope:
            asked += 1
            frame = await self._serve(frame, call, deadline, serve if asked <= MAX_ASKS else None)
        return frame

    async def _next(self, call: int, deadline: float) -> Frame:
        while True:
            frame = await self._wire.receive(deadline)
            number = frame.envelope.get("id")
            if type(number) is not int or number > call:
                raise WireError(f"an answer to call {number!r} while {call} runs")
            if number == call:
                return frame

    async def _serve(self, ask: Frame, call: int, deadline: float, serve: Mapping[str, HostFunction] | None) -> Frame:
        """Answer one question; the next frame of the call, which may come before the function has ended."""
        number = ask.envelope["ask"]
        inside = _serving.set(_serving.get() | {id(self)})
        try:
            answer = _begin(ask.body, serve)
            working = None if isinstance(answer, bytes) else asyncio.ensure_future(_finish(answer))
        finally:
            _serving.reset(inside)
        if working is None:
            assert isinstance(answer, bytes)
            self._wire.send({"id": call, "answer": number}, answer)
            return await self._next(call, deadline)
        hearing = asyncio.ensure_future(self._next(call, deadline))
        try:
            await asyncio.wait({working, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                self._wire.send({"id": call, "answer": number}, working.result())
            return await hearing
        finally:
            await _cancelled(working)
            await _cancelled(hearing)


def _begin(body: bytes, serve: Mapping[str, HostFunction] | None) -> bytes | Awaitable[object]:
    """Call the function that was asked for: its answer, or what to wait for. Infrastructure errors are raised."""
    try:
        if serve is None:
            raise ToolError(f"over {MAX_ASKS} calls of host functions in one cell")
        name, args, kwargs = _question(body)
        if name not in serve:
            raise ToolError(f"there is no host function {name!r} in this call")
        value = serve[name](*args, **kwargs)
        return value if isawaitable(value) else _answer(value)
    except Exception as error:
        return _refusal(error)


async def _finish(value: Awaitable[object]) -> bytes:
    try:
        return _answer(await value)
    except Exception as error:
        return _refusal(error)


def _answer(value: object) -> bytes:
    answer = json.dumps({"value": value}).encode()
    if len(answer) > MAX_FILE:
        raise ToolError(f"an answer of {len(answer)} bytes is over {MAX_FILE}")
    return answer


def _refusal(error: Exception) -> bytes:
    """What the code in the box reads; an error of infrastructure is not for it, and is raised here."""
    if isinstance(error, AgentGymError) and not isinstance(error, ToolError):
        raise error
    text = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": text[:10_000]}).encode()


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """Cancel and wait, whatever comes of it: its result is not wanted any more."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _question(body: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    try:
        name, args, kwargs = json.loads(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolError("a question that is not JSON") from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise ToolError("a question that is not a name and its arguments")
    return name, args, kwargs


def _text(text: str, field: str) -> bytes:
    body = text.encode("utf-8", "surrogatepass")
    if len(body) > MAX_CODE:
        raise ValueError(f"{field}: {len(body)} bytes, the limit is {MAX_CODE}")
    return body


def _batches(files: Mapping[str, str | bytes]) -> Iterator[tuple[list[tuple[str, int]], bytes]]:
    """Frames of at most 16 MiB and 200 files."""
    names: list[tuple[str, int]] = []
    parts: list[bytes] = []
    size = 0
    for path, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        if len(data) > MAX_FILE:
            raise ValueError(f"{path!r}: {len(data)} bytes, the limit is {MAX_FILE}")
        if names and (size + len(data) > MAX_FILE or len(names) == MAX_BATCH):
            yield names, b"".join(parts)
            names, parts, size = [], [], 0
        names.append((path, len(data)))
        parts.append(data)
        size += len(data)
    if names:
        yield names, b"".join(parts)


def _raise_refusal(envelope: Mapping[str, Any], fields: Mapping[str, object]) -> None:
    """OSError by its number, so that a missing file is FileNotFoundError; ValueError for what the box refuses."""
    text, number = envelope.get("error"), envelope.get("errno")
    if not isinstance(text, str):
        return
    if isinstance(number, int):
        path = fields.get("path")
        raise OSError(number, text, path) if isinstance(path, str) else OSError(number, text)
    raise ValueError(text)


def _result(frame: Frame, box: RemoteBox) -> ExecResult:
    """The answer's facts, typed and size-checked."""
    try:
        result = _parse(frame)
    except (KeyError, TypeError, WireError) as error:
        box.cut()
        raise SandboxError(f"the box gave an answer that makes no sense: {error!r}") from error
    box.worn |= result.status in ("oom", "protocol")
    return result


def _parse(frame: Frame) -> ExecResult:
    said = frame.envelope
    out, err = said["stdout"], said["stderr"]
    checks = {
        "status": said["status"] in STATUSES,
        "exit_code": type(said["exit_code"]) is int,
        "sizes": type(out) is int and type(err) is int and out >= 0 and err >= 0 and out + err == len(frame.body),
        "flags": type(said["truncated"]) is bool and type(said["state_lost"]) is bool,
        "seconds": isinstance(said["seconds"], (int, float)),
    }
    wrong = [name for name, right in checks.items() if not right]
    if wrong:
        raise WireError(f"wrong {', '.join(wrong)}")
    return ExecResult(
        status=said["status"],
        exit_code=said["exit_code"],
        stdout=frame.body[:out].decode("utf-8", "replace"),
        stderr=frame.body[out:].decode("utf-8", "replace"),
        truncated=said["truncated"],
        state_lost=said["state_lost"],
        seconds=float(said["seconds"]),
    )
