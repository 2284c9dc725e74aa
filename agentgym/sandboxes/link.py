"""Calls over the wire of one box, one at a time, and the host functions that code in the box calls."""

import asyncio
import errno
import itertools
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from inspect import isawaitable
from typing import Any, Protocol, TypeAlias

from agentgym.boxes import HostFunction
from agentgym.errors import AgentGymError, SandboxError, ToolError, WireError
from agentgym.sandboxes.faults import finished
from agentgym.sandboxes.wire import Frame, Wire

TRUNK = 0
"""The number of the session that a box starts with; forks get the others."""
SANDBOX_LOST = "sandbox_lost"
"""The beginning of a SandboxError's text where an episode's box is gone, or could not be started."""
MAX_FILE = 16 << 20
MAX_ASKS = 1000
MAX_OPEN_ASKS = 8
"""Calls of host functions that wait for their answer at once; the server's limit is the same."""

Carry: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Takes each part of a stream, and returns the bytes to answer it with."""


class NotAFile(ValueError):
    """The path of a file call names a link, a folder, a pipe, a socket or a device."""


class UnusablePath(OSError, ValueError):
    """What a box's kernel says against a path, by its number: no permission, a file in the way, a full disk."""


class NoPermission(UnusablePath, PermissionError):
    """A path whose permissions forbid what was asked."""


class NotAFolder(UnusablePath, NotADirectoryError):
    """A path in which something that is no folder stands for one."""


class IsAFolder(UnusablePath, IsADirectoryError):
    """The path of a folder, where a file's was needed."""


REFUSALS: dict[int, type[OSError]] = {
    errno.ENOENT: FileNotFoundError,
    errno.EACCES: NoPermission,
    errno.EPERM: NoPermission,
    errno.ENOTDIR: NotAFolder,
    errno.EISDIR: IsAFolder,
}


_serving: ContextVar[frozenset[int]] = ContextVar("_serving", default=frozenset())
"""The boxes whose code waits for the host function that runs now."""


class Listener(Protocol):
    """A program in the background, as far as the wire is concerned."""

    def hear(self, frame: Frame) -> None: ...

    def lose(self) -> None: ...


class Link:
    """The wire of one box: one call at a time, whichever session it is for; others wait for their turn."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self._ending: list[dict[str, object]] = []
        self._broken: str | None = None
        self.processes: dict[int, Listener] = {}
        """The programs in the background, by their numbers."""
        wire.aside, wire.lost = self._hear, self.lose_processes
        self.needs_replacement = False
        """Whether the box works but should be replaced by a new one before its next lease."""
        self.created_at = self.used = asyncio.get_running_loop().time()
        """The times at which the wire was opened and the last call began or ended, on the loop's clock."""

    @property
    def broken(self) -> str | None:
        """The reason why no call can be answered any more; None while the box works."""
        return self._broken or self._wire.error

    def cut(self, why: str) -> None:
        """Close the wire at once; the box then ends by itself."""
        self._broken = self.broken or why
        self._wire.close()

    async def call(
        self,
        op: str,
        body: bytes,
        patience_s: float,
        serve: Mapping[str, HostFunction] | None = None,
        carry: Carry | None = None,
        **fields: object,
    ) -> Frame:
        """Make one call and return its answer; SandboxError where the box does not give one.

        A call that is cancelled is ended inside the box too. `carry` gets each part of a stream and returns the bytes
        to answer it with, before which the box sends no other part.
        """
        if id(self) in _serving.get():
            raise RuntimeError("a host function cannot call the box whose code waits for it")
        async with self._lock:
            if self.broken:
                raise SandboxError(f"{SANDBOX_LOST}: {self.broken}")
            call = 0
            try:
                if self._ending:
                    self._end_now()
                call = next(self._ids)
                self._wire.send({"id": call, "op": op, **fields}, body)
                now = self.used = asyncio.get_running_loop().time()
                frame = await self._answer(call, now + patience_s, serve or {}, carry)
            except (WireError, TimeoutError) as error:
                self.cut(str(error))
                raise SandboxError(f"{SANDBOX_LOST}: {error}") from error
            except BaseException:
                # The call still runs in the box: end it. The next call skips its answer.
                with suppress(WireError):
                    self._wire.send({"id": call, "op": "cancel"})
                raise
            self.used = asyncio.get_running_loop().time()
        if len(frame.envelope) > 1:
            raise_refusal(frame.envelope, fields)
        return frame

    def tell(self, envelope: dict[str, Any], body: bytes = b"") -> None:
        """Say something that has no answer, whatever call runs; WireError where the wire is closed."""
        self._wire.send(envelope, body)
        self.used = asyncio.get_running_loop().time()

    async def finish(self, op: str, timeout_s: float, **fields: Any) -> None:
        """Make a call that ends something, also where this task is cancelled; it is nothing where the box is gone."""
        with suppress(SandboxError):
            await finished(asyncio.ensure_future(self.call(op, b"", timeout_s, **fields)))

    def _hear(self, frame: Frame) -> None:
        """Hand a frame to the program that it tells of; those of programs that were closed are dropped."""
        number = frame.envelope["process"]
        listener = self.processes.get(number) if type(number) is int else None
        if listener is not None:
            listener.hear(frame)
            self.used = asyncio.get_running_loop().time()

    def lose_processes(self) -> None:
        """Tell those who wait for programs in the background that these are gone."""
        for listener in [*self.processes.values()]:
            listener.lose()

    def new_number(self) -> int:
        """Return a number that no other call, session or program of this box ever has."""
        return next(self._ids)

    def end_later(self, op: str, **fields: object) -> None:
        """Make a call that ends something before the next call; its answer is skipped."""
        self._ending.append({"op": op, **fields})

    def _end_now(self) -> None:
        while self._ending:
            self._wire.send({"id": next(self._ids), **self._ending.pop()})

    async def _answer(
        self, call: int, deadline: float, serve: Mapping[str, HostFunction], carry: Carry | None
    ) -> Frame:
        """Return the frame that ends the call; parts of a stream and calls of host functions before it are answered."""
        asked = 0
        waiting: deque[Frame] = deque()
        while True:
            frame = waiting.popleft() if waiting else await self._next(call, deadline)
            if carry is not None and "part" in frame.envelope:
                self._wire.send({"id": call, "answer": frame.envelope["part"]}, await carry(frame.body))
                continue
            if "ask" not in frame.envelope:
                return frame
            asked += 1
            end = await self._serve(frame, call, deadline, serve if asked <= MAX_ASKS else None, waiting)
            if end is not None:
                return end

    async def _next(self, call: int, deadline: float) -> Frame:
        """Return the call's next frame; TimeoutError at the deadline, however many frames of other kinds come.

        An answer that is there at the deadline counts: the loop may have been held up.
        """
        late = 0
        while True:
            frame = await self._wire.receive(deadline)
            number = frame.envelope.get("id")
            if type(number) is not int or number > call:
                raise WireError(f"an answer to call {number!r} while {call} runs")
            if asyncio.get_running_loop().time() < deadline:
                if number == call:
                    return frame
            elif number == call and not {"ask", "part"} & frame.envelope.keys():
                return frame
            else:
                late += 1
                if late > MAX_OPEN_ASKS:
                    raise TimeoutError("the box did not answer in time")

    async def _serve(
        self,
        ask: Frame,
        call: int,
        deadline: float,
        serve: Mapping[str, HostFunction] | None,
        waiting: "deque[Frame]",
    ) -> Frame | None:
        """Answer one call of a host function; return the call's end where that comes before the function's.

        The calls that come meanwhile are put behind those that are `waiting`.
        """
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
            return None
        hearing = asyncio.ensure_future(self._hear_end(call, deadline, waiting))
        try:
            await asyncio.wait({working, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                return hearing.result()
            self._wire.send({"id": call, "answer": number}, working.result())
            return None
        finally:
            await _cancelled(working)
            await _cancelled(hearing)

    async def _hear_end(self, call: int, deadline: float, waiting: "deque[Frame]") -> Frame:
        """Return the frame that ends the call; put the calls of host functions before it aside."""
        while "ask" in (frame := await self._next(call, deadline)).envelope:
            waiting.append(frame)
            if len(waiting) > MAX_OPEN_ASKS:
                raise WireError(f"over {MAX_OPEN_ASKS} calls of host functions at once")
        return frame


def _begin(body: bytes, serve: Mapping[str, HostFunction] | None) -> bytes | Awaitable[object]:
    """Call a host function: its answer, or an awaitable of it. Errors of infrastructure are raised."""
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
    """The answer that code in the box reads; an error of infrastructure is raised here instead."""
    if isinstance(error, AgentGymError) and not isinstance(error, ToolError):
        raise error
    text = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": text[:10_000]}).encode()


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end; its result is dropped."""
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


def raise_refusal(envelope: Mapping[str, Any], fields: Mapping[str, object]) -> None:
    """Raise the box's refusal: FileNotFoundError for a missing file, else ValueError."""
    text, number = envelope.get("error"), envelope.get("errno")
    if envelope.get("gone") is True:
        raise SandboxError(f"{SANDBOX_LOST}: the branch was closed, or ended with its episode")
    if not isinstance(text, str):
        return
    if isinstance(number, int):
        kind = REFUSALS.get(number, UnusablePath)
        path = fields.get("path")
        raise kind(number, text, path) if isinstance(path, str) else kind(number, text)
    raise NotAFile(text) if envelope.get("not_a_file") is True else ValueError(text)
