"""Calls over the wire of one box, one at a time, and the host functions that code in the box calls."""

import asyncio
import functools
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from inspect import isawaitable
from typing import Any, TypeAlias

from agentgym.boxes import HostFunction
from agentgym.errors import AgentGymError, BoxKilledError, SandboxError, ToolError, WireError
from agentgym.sandboxes.wire import Frame, Wire

TRUNK = 0
"""The number of the session that a box starts with; forks get the others."""
SANDBOX_LOST = "sandbox_lost"
"""The beginning of a SandboxError's text where an episode's box is gone, or could not be started."""
MAX_FILE = 16 << 20
MAX_ASKS = 1000
_log = logging.getLogger("agentgym.sandboxes")


WhyItEnded: TypeAlias = Callable[[], Awaitable[str | None]]
"""Waits for the end of a box whose wire has closed: how the code in it ended it; None where something else did."""


class NotAFile(ValueError):
    """The path of a file call names a link, a pipe, a socket or a device."""


_serving: ContextVar[frozenset[int]] = ContextVar("_serving", default=frozenset())
"""The boxes whose code waits for the host function that runs now."""


class Link:
    """The wire of one box: one call at a time, whichever session it is for; others wait for their turn."""

    def __init__(self, wire: Wire, why_it_ended: WhyItEnded | None = None) -> None:
        self._wire = wire
        self._why_it_ended = why_it_ended
        self._killed: str | None = None
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self._ending: list[int] = []
        self._broken: str | None = None
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
        self, op: str, body: bytes, patience_s: float, serve: Mapping[str, HostFunction] | None = None, **fields: object
    ) -> Frame:
        """Make one call and return its answer; SandboxError where the box does not give one.

        A call that is cancelled is ended inside the box too.
        """
        if id(self) in _serving.get():
            raise RuntimeError("a host function cannot call the box whose code waits for it")
        async with self._lock:
            if self.broken:
                raise await self._lost()
            call = 0
            try:
                if self._ending:
                    self._end_branches()
                call = next(self._ids)
                self._wire.send({"id": call, "op": op, **fields}, body)
                now = self.used = asyncio.get_running_loop().time()
                frame = await self._answer(call, now + patience_s, serve)
            except WireError as error:
                raise await self._lost(str(error)) from error
            except TimeoutError as error:
                self.cut(str(error))
                raise SandboxError(f"{SANDBOX_LOST}: {error}") from error
            except BaseException:
                # The call still runs in the box: end it. The next call skips its answer.
                with suppress(WireError):
                    self._wire.send({"id": call, "op": "cancel"})
                raise
            self.used = asyncio.get_running_loop().time()
        if len(frame.envelope) > 1:
            _raise_refusal(frame.envelope, fields)
        return frame

    async def _lost(self, why: str = "") -> SandboxError:
        """The error for a box that is gone: BoxKilledError where it ended by itself, of what the code in it did."""
        if self._broken is None and self._why_it_ended is not None:
            self._wire.close()  # A box that still runs ends now, by our will, and not of its code.
            self._killed = await self._why_it_ended()
        self.cut(self._killed or why or "the wire is closed")
        if self._killed is not None:
            return BoxKilledError(f"the box was ended by the code that ran in it: {self._killed}")
        return SandboxError(f"{SANDBOX_LOST}: {self.broken}")

    def new_session(self) -> int:
        """Return a number that no other session of this box ever has."""
        return next(self._ids)

    def end_later(self, branch: int) -> None:
        """End a branch before the next call; its answer is skipped."""
        self._ending.append(branch)

    def _end_branches(self) -> None:
        while self._ending:
            self._wire.send({"id": next(self._ids), "op": "end", "branch": self._ending.pop()})

    async def _answer(self, call: int, deadline: float, serve: Mapping[str, HostFunction] | None) -> Frame:
        """Return the frame that ends the call; calls of host functions before it are answered."""
        asked = 0
        frame = await self._next(call, deadline)
        while "ask" in frame.envelope:
            asked += 1
            frame = await self._serve(frame, call, deadline, serve or {} if asked <= MAX_ASKS else None)
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
        """Answer one call of a host function; return the next frame, which may come before the function has ended."""
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


def _raise_refusal(envelope: Mapping[str, Any], fields: Mapping[str, object]) -> None:
    """Raise the box's refusal: OSError by its number (a missing file is FileNotFoundError), else ValueError."""
    text, number = envelope.get("error"), envelope.get("errno")
    if envelope.get("gone") is True:
        raise SandboxError(f"{SANDBOX_LOST}: the branch was closed, or ended with its episode")
    if not isinstance(text, str):
        return
    if isinstance(number, int):
        path = fields.get("path")
        raise OSError(number, text, path) if isinstance(path, str) else OSError(number, text)
    raise NotAFile(text) if envelope.get("not_a_file") is True else ValueError(text)


def tell_of_place(hello: Mapping[str, object], digest: str) -> None:
    """Log, once for each kind of box, what its kernel does not let it have."""
    if hello.get("place") == "old" and hello.get("why"):
        _tell_once(
            digest,
            "episodes are reset in place, and counters of the kernel carry over: it lets no episode have namespaces "
            f"of its own ({hello['why']})",
        )
    if hello.get("not_private"):
        _tell_once(digest, f"boxes share the locks and watches of {hello['not_private']} with this machine")


@functools.cache
def _tell_once(digest: str, what: str) -> None:
    _log.warning("%s: %s", digest, what)
