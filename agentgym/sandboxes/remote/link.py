"""Calls over the connection of one sandbox, one at a time, and the host functions that code in the sandbox calls."""

import asyncio
import functools
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from agentgym.errors import SandboxError, SandboxKilledError, WireError
from agentgym.machine.finished import finished
from agentgym.sandboxes.protocol import HostFunction
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.remote.host_functions import MAX_ASKS, begin_answer, cancelled
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST, raise_refusal
from agentgym.sandboxes.remote.wire import Frame, FrameTooLarge, Wire

TRUNK = 0
"""The number of the session that a sandbox starts with; forks have other numbers."""
MAX_OPEN_ASKS = 8
"""Maximum number of host function calls that wait for their answers at once; the server has the same limit."""
SERVER_ASKS = 2 * MAX_ASKS
"""Number of host function calls after which the server ends a cell.

If more calls arrive, the other end of the connection isn't our server.
"""
MAX_QUESTION = 1 << 20
"""Maximum bytes of a host function call; the server has the same limit."""
IN_PLACE = "episodes are reset in place: kernel counters carry over, and a hidden test's programs can change its files"
_log = logging.getLogger("agentgym.sandboxes")

Carry: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Takes each part of a stream that the sandbox sends during a call, and returns the bytes of the reply to that part."""
WhyItEnded: TypeAlias = Callable[[], Awaitable[str | None]]
"""Waits for the end of a sandbox whose connection closed, and returns how the code in the sandbox ended it.

The result is None if something else ended the sandbox.
"""


_serving: ContextVar[frozenset[int]] = ContextVar("_serving", default=frozenset())
"""Ids of the links whose sandboxes wait for the host function that is running in this context."""


class Listener(Protocol):
    """A background program, to which the link passes its messages."""

    def hear(self, frame: Frame) -> None: ...

    def lose(self) -> None: ...


class Link:
    """The connection to one sandbox.

    It handles one call at a time, whichever session the call is for; other calls wait.
    """

    def __init__(self, wire: Wire, why_it_ended: WhyItEnded | None = None) -> None:
        self._wire = wire
        self._why_it_ended = why_it_ended
        self._killed: str | None = None
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self._ending: list[dict[str, object]] = []
        self._broken: str | None = None
        self.processes: dict[int, Listener] = {}
        """The background programs, keyed by number."""
        wire.aside, wire.lost = self._hear, self.lose_processes
        self.needs_replacement = False
        """Whether the sandbox works but should be replaced by a new one before its next lease."""
        self.created_at = self.used = self._loop.time()
        """When the connection was opened, and when the last call started or ended, on the event loop's clock."""

    @property
    def broken(self) -> str | None:
        """The reason why no more calls are possible, or None while the sandbox works."""
        return self._broken or self._wire.error

    def cut(self, why: str, *, by_its_code: bool = False) -> None:
        """Close the connection at once; the sandbox then ends by itself.

        If `by_its_code`, calls raise SandboxKilledError.
        """
        if by_its_code and self.broken is None:
            self._killed = why
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
        """Make one call and return its answer.

        A cancelled call is ended inside the sandbox, too.

        Args:
            op: The operation that the sandbox's server performs.
            body: The raw bytes of the request.
            patience_s: Seconds to wait for the end of the call; after that, the connection is closed.
            serve: The host functions that code in the sandbox may call during the call; None for none.
            carry: Takes each part of a stream, and returns the bytes of the reply. The sandbox sends the next part
                only after the reply.
            **fields: Further fields of the request.

        Raises:
            SandboxError: If the sandbox doesn't answer.
            SandboxContentError: If the sandbox refuses the call.
        """
        if id(self) in _serving.get():
            raise RuntimeError("a host function can't call the sandbox whose code is waiting for it")
        async with self._lock:
            if self.broken:
                raise await self.lost()
            call = 0
            try:
                while self._ending:
                    self._wire.send({"id": next(self._ids), **self._ending.pop()})
                call = next(self._ids)
                self._wire.send({"id": call, "op": op, **fields}, body)
                now = self.used = self._loop.time()
                frame = await self._answer(call, now + patience_s, serve or {}, carry)
            except FrameTooLarge as error:
                raise WrongContent(f"the call is too large: {error}") from None  # Nothing of it was sent.
            except WireError as error:
                raise await self.lost(str(error)) from error
            except TimeoutError as error:
                self.cut(str(error))
                raise SandboxError(f"{SANDBOX_LOST}: {error}") from error
            except BaseException:
                # The call still runs in the sandbox: end it. The next call skips its answer.
                with suppress(WireError):
                    self._wire.send({"id": call, "op": "cancel"})
                raise
            self.used = self._loop.time()
        if len(frame.envelope) > 1:
            self._check_refusal(frame, fields)
        return frame

    def _check_refusal(self, frame: Frame, fields: Mapping[str, object]) -> None:
        """Raise the error in a sandbox's answer; a sandbox whose error is invalid is cut off."""
        try:
            raise_refusal(frame.envelope, fields)
        except WireError as error:
            self.cut("it was closed")
            raise SandboxError(f"{SANDBOX_LOST}: {error}") from error

    def tell(self, envelope: dict[str, Any], body: bytes = b"") -> None:
        """Send a message that has no answer, whatever call is running.

        Raises:
            WireError: If the connection is closed.
        """
        self._wire.send(envelope, body)
        self.used = self._loop.time()

    async def finish(self, op: str, patience_s: float, **fields: Any) -> None:
        """Make a call that ends something, even if this task is cancelled; do nothing if the sandbox is gone."""
        with suppress(SandboxError):
            await finished(asyncio.ensure_future(self.call(op, b"", patience_s, **fields)))

    def _hear(self, frame: Frame) -> None:
        """Pass a frame to its program; frames of closed programs are dropped."""
        number = frame.envelope["process"]
        listener = self.processes.get(number) if type(number) is int else None
        if listener is not None:
            listener.hear(frame)
            self.used = self._loop.time()

    def lose_processes(self) -> None:
        """Notify the waiters of all background programs that the programs are gone."""
        for listener in [*self.processes.values()]:
            listener.lose()

    async def lost(self, why: str = "") -> SandboxError:
        """Return the error for a lost sandbox, which is a SandboxKilledError if code in the sandbox ended it."""
        if self._broken is None and self._why_it_ended is not None:
            self._wire.close()  # A sandbox that still runs ends now because of us, not its code.
            self._killed = await self._why_it_ended()
        self.cut(self._killed or why or "the connection to the sandbox is closed")
        if self._killed is not None:
            return SandboxKilledError(f"the sandbox was terminated by the code that ran in it: {self._killed}")
        return SandboxError(f"{SANDBOX_LOST}: {self.broken}")

    def new_number(self) -> int:
        """Return a number that is unique among this sandbox's calls, sessions and programs."""
        return next(self._ids)

    def end_later(self, op: str, **fields: object) -> None:
        """Schedule a call that ends something; it is sent before the next call, and its answer is skipped."""
        self._ending.append({"op": op, **fields})

    async def _answer(
        self, call: int, deadline: float, serve: Mapping[str, HostFunction], carry: Carry | None
    ) -> Frame:
        """Return the frame that ends the call, after answering stream parts and host function calls that precede it."""
        asked = 0
        waiting: deque[Frame] = deque()
        while True:
            frame = waiting.popleft() if waiting else await self._next(call, deadline)
            if carry is not None and "part" in frame.envelope:
                self._wire.send({"id": call, "answer": frame.envelope["part"]}, await carry(frame.body))
            elif "ask" not in frame.envelope:
                return frame
            else:
                asked += 1
                if asked > SERVER_ASKS or len(frame.body) > MAX_QUESTION:
                    raise WireError(
                        f"the sandbox exceeded a limit: it sent host function call {asked} in one cell (at most "
                        f"{SERVER_ASKS}), with {len(frame.body)} bytes (at most {MAX_QUESTION})"
                    )
                end = await self._serve(frame, call, deadline, serve if asked <= MAX_ASKS else None, waiting)
                if end is not None:
                    return end
            # Frames that have already arrived are received without a wait, so let other asyncio tasks run first.
            if waiting or self._wire.holds_frames:
                await asyncio.sleep(0)

    async def _next(self, call: int, deadline: float) -> Frame:
        """Return the call's next frame.

        If the event loop was blocked past the deadline, an answer that has arrived by the time of the check still
        counts.

        Raises:
            TimeoutError: At the deadline, however many frames of other kinds arrive.
        """
        late = 0
        while True:
            frame = await self._wire.receive(deadline)
            number = frame.envelope.get("id")
            if type(number) is not int or number > call:
                raise WireError(f"the sandbox sent an answer to call {number!r} while call {call} was running")
            if self._loop.time() < deadline:
                if number == call:
                    return frame
            elif number == call and not {"ask", "part"} & frame.envelope.keys():
                return frame
            else:
                late += 1
                if late > MAX_OPEN_ASKS:
                    raise TimeoutError("the sandbox did not answer in time")

    async def _serve(
        self,
        ask: Frame,
        call: int,
        deadline: float,
        serve: Mapping[str, HostFunction] | None,
        waiting: "deque[Frame]",
    ) -> Frame | None:
        """Answer one host function call; return the frame that ends the call if it comes before the function returns.

        Host function calls that arrive meanwhile are appended to `waiting`.
        """
        number = ask.envelope["ask"]
        inside = _serving.set(_serving.get() | {id(self)})
        try:
            answer = begin_answer(ask.body, serve)
            working = None if isinstance(answer, bytes) else asyncio.ensure_future(answer)
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
            await cancelled(working)
            await cancelled(hearing)

    async def _hear_end(self, call: int, deadline: float, waiting: "deque[Frame]") -> Frame:
        """Return the frame that ends the call; host function calls before it are appended to `waiting`."""
        while "ask" in (frame := await self._next(call, deadline)).envelope:
            waiting.append(frame)
            if len(waiting) > MAX_OPEN_ASKS:
                raise WireError(f"the sandbox sent more than {MAX_OPEN_ASKS} host function calls at once")
        return frame


def tell_of_place(hello: Mapping[str, object], digest: str) -> None:
    """Log, once per kind of sandbox, how it is reset, and warn about anything that its kernel does not allow.

    Args:
        hello: The server's first message.
        digest: The image's digest, or the kind of sandbox with its server's digest. Each log message begins with it.
    """
    if hello.get("place") == "new":
        _tell_once(digest, "each episode has its own namespaces", logging.INFO)
    elif hello.get("why"):
        _tell_once(digest, f"{IN_PLACE}: episodes can't have their own namespaces ({hello['why']})")
    else:
        _tell_once(digest, IN_PLACE, logging.INFO)
    if hello.get("not_private"):
        _tell_once(digest, f"sandboxes share file locks and watches on {hello['not_private']} with this machine")


@functools.cache
def _tell_once(digest: str, what: str, level: int = logging.WARNING) -> None:
    _log.log(level, "%s: %s", digest, what)
