"""Frames over one stream socket: the length of an envelope (4 bytes, big-endian), the envelope (JSON), and a raw body.

The envelope's field `body` is the size of the body in bytes; without this field, there is no body.
"""

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from agentgym.errors import WireError

MAX_ENVELOPE = 1 << 20
MAX_BODY = 18 << 20
MAX_HELD = 16
"""Number of unreceived frames at which a connection stops reading.

The other end sends only a few frames at once and then waits.
"""
_LENGTH = struct.Struct(">I")
_decode = json.JSONDecoder().raw_decode  # The wrappers json.dumps and json.loads take as long as the work itself.


def _encoder() -> Callable[[Any], str]:
    """Return a function like json.dumps, but without the setup that json.dumps repeats in each call.

    That setup takes as long as the encoding itself.
    """
    plain = json.JSONEncoder(check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    pieces = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True)
    return lambda value: "".join(pieces(value, 0))


_encode = _encoder()


class FrameTooLarge(WireError):
    """A frame that the other end would not accept; no part of it was sent."""


class Frame(NamedTuple):
    """One message: a JSON object and raw bytes."""

    envelope: dict[str, Any]
    body: bytes


def encode(envelope: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame.

    Raises:
        FrameTooLarge: If the frame is larger than the other end accepts.
    """
    if body:
        envelope = {**envelope, "body": len(body)}
    head = _encode(envelope).encode()
    if len(head) > MAX_ENVELOPE or len(body) > MAX_BODY:
        raise FrameTooLarge(
            f"the frame has an envelope of {len(head)} bytes and a body of {len(body)} bytes, but the limits are "
            f"{MAX_ENVELOPE} and {MAX_BODY}"
        )
    return _LENGTH.pack(len(head)) + head + body


class Decoder:
    """Splits incoming bytes into whole frames; raises WireError at the first frame that is malformed or too large."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._needed = _LENGTH.size
        """Minimum number of bytes needed before another frame can be complete."""

    def feed(self, data: bytes) -> list[Frame]:
        """Add `data` and return the frames that it completed."""
        if not self._data and (frame := _whole(data)) is not None:
            return [frame]
        self._data += data
        frames: list[Frame] = []
        while len(self._data) >= self._needed:
            frame = self._take()
            if frame is not None:
                frames.append(frame)
        return frames

    def _take(self) -> Frame | None:
        """Remove and return the first frame; if it is incomplete, note how many bytes it needs and return None."""
        (size,) = _LENGTH.unpack_from(self._data)
        if size > MAX_ENVELOPE:
            raise WireError(f"the sandbox sent an envelope that is too large: {size} bytes")
        start = self._needed = _LENGTH.size + size
        if len(self._data) < start:
            return None
        envelope = _envelope(self._data[_LENGTH.size : start])
        end = self._needed = start + _body_size(envelope)
        if len(self._data) < end:
            return None
        body = bytes(self._data[start:end])
        del self._data[:end]
        self._needed = _LENGTH.size
        return Frame(envelope, body)


def _whole(data: bytes) -> Frame | None:
    """Return the frame if the bytes are exactly one frame, which is the usual case, or else None."""
    if len(data) < _LENGTH.size:
        return None
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if start > min(len(data), MAX_ENVELOPE):
        return None
    envelope = _envelope(data[_LENGTH.size : start])
    return Frame(envelope, data[start:]) if start + _body_size(envelope) == len(data) else None


def _envelope(piece: bytes | bytearray) -> dict[str, Any]:
    try:
        text = piece.decode()
        envelope, end = _decode(text)
    except (ValueError, RecursionError) as error:
        raise WireError("the sandbox sent an envelope that is not JSON") from error
    if end != len(text):
        raise WireError("the sandbox sent an envelope that is not JSON")
    if not isinstance(envelope, dict):
        raise WireError("the sandbox sent an envelope that is not a JSON object")
    return envelope


def _body_size(envelope: dict[str, Any]) -> int:
    size = envelope.get("body", 0)
    if type(size) is not int or not 0 <= size <= MAX_BODY:
        raise WireError(f"the sandbox sent an envelope with an invalid body size: {size!r} bytes")
    return size


class Wire(asyncio.Protocol):
    """One end of the connection between the host and a sandbox.

    `send` never waits. `receive` returns whole frames in order, and cancelling it loses none.
    """

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._frames: deque[Frame] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        """The time at which the wait ends without a frame, on the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._error: WireError | None = None
        self.aside: Callable[[Frame], None] | None = None
        """Called with the frames of background programs, which may come at any time.

        If it raises WireError, the connection is closed. If it is None, `receive` returns these frames like any others.
        """
        self.lost: Callable[[], None] | None = None
        """Called when no more frames can come."""

    @classmethod
    async def over(cls, connection: socket.socket) -> "Wire":
        """Open a connection over a connected socket, which the new object then owns."""
        connection.setblocking(False)
        try:
            _, wire = await asyncio.get_running_loop().create_connection(cls, sock=connection)
        except BaseException:
            connection.close()
            raise
        return wire

    @property
    def error(self) -> str | None:
        """The reason why the connection is closed, or None while it is open."""
        return None if self._error is None else str(self._error)

    @property
    def holds_frames(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(self._frames)

    def send(self, envelope: dict[str, Any], body: bytes = b"") -> None:
        """Pass a frame to the socket.

        Raises:
            WireError: If the connection is closed.
            FrameTooLarge: If the frame is larger than the other end accepts.
        """
        if self._error is not None or self._transport is None:
            raise WireError("the connection to the sandbox is closed") from self._error
        self._transport.write(encode(envelope, body))

    async def receive(self, deadline: float) -> Frame:
        """Return the next frame.

        Raises:
            TimeoutError: At `deadline` on the event loop's clock.
            WireError: If no more frames can come.
        """
        while not self._frames:
            if self._error is not None:
                raise WireError(str(self._error)) from self._error
            await self._news(deadline)
        frame = self._frames.popleft()
        if self._is_paused and len(self._frames) < MAX_HELD:
            self._pause(False)
        return frame

    async def _news(self, deadline: float) -> None:
        waiter = self._waiter = self._loop.create_future()
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            self._wake_at(deadline)
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake_at(self, time: float) -> None:
        """Set this connection's only timer to fire at `time`, on the event loop's clock.

        One timer serves one wait after another, because most waits end long before it fires. asyncio.timeout doesn't
        fit: if the event loop was blocked past the deadline, a frame that has arrived must win.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._deadline > self._loop.time():
            self._wake_at(self._deadline)
        else:
            self._waiter.set_exception(TimeoutError("the sandbox did not answer in time"))

    def close(self) -> None:
        """Cut the connection at once; the server at the other end then ends everything below it."""
        self._fail(WireError("the connection to the sandbox is closed"))
        if self._transport is None or self._transport.is_closing():
            return
        with suppress(OSError):
            # A process that was forked from this one may still have the socket open, so closing it alone wouldn't end
            # the connection.
            self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if self.aside is not None and "process" in frame.envelope:
                    self.aside(frame)
                else:
                    self._frames.append(frame)
        except WireError as error:
            self._fail(error)
            self.close()
        if len(self._frames) >= MAX_HELD and not self._is_paused:
            self._pause(True)
        self._wake()

    def _pause(self, paused: bool) -> None:
        self._is_paused = paused
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    def eof_received(self) -> None:
        """Cut the connection.

        A sandbox that sends nothing more answers no more calls, and data that it doesn't read would stay unsent.
        """
        self._fail(WireError("the sandbox closed the connection"))
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(WireError(f"the sandbox closed the connection{f': {exc}' if exc else ''}"))

    def _fail(self, error: WireError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._error is None:
            self._error = error
            if self.lost is not None:
                self.lost()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
