"""One HTTP/1.1 connection: writes each request whole, and parses the response as its bytes arrive."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, cast

from agentgym.errors import WireError

_HEAD_LIMIT = 1 << 16
"""Maximum number of bytes in each of these parts of a response: the status line with the headers, the line with a
chunk's size, and a trailer line.
"""
_JOINED = 1 << 20
"""Maximum size, in bytes, of a request whose parts are joined and sent in one write, which is cheaper than several
writes.
"""
_LINES = 256
"""Maximum number of cached entries, both for parsed status lines and for parsed header lines. A server sends the same
few lines with every response.
"""

_ONCE = ("content-length", "transfer-encoding")
"""Headers that determine the length of the body. A response that contains one of them twice, with different values, is
ambiguous.
"""
_CODINGS = ("transfer-encoding", "content-encoding")
"""Headers that determine how the body is encoded."""
_DIGITS = {10: frozenset("0123456789"), 16: frozenset("0123456789abcdefABCDEF")}


class RawAnswer(NamedTuple):
    """A response's status and body, and whether the server keeps the connection open."""

    status: int
    body: bytearray
    keep: bool


class HttpLink(asyncio.Protocol):
    """A client's connection, which handles one request at a time.

    The future of a request fails with OSError if the connection is lost. It fails with WireError if the response
    isn't HTTP/1 or has an encoding that wasn't requested. If bytes arrive while no request is pending, the connection
    is closed and can't be used again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[RawAnswer] | None = None
        """Future of the pending response."""
        self._held = bytearray()
        """Received bytes that aren't parsed yet."""
        self._read: Callable[[], bool] = self._read_head
        """The function that parses the next part of the response from `_held`, and returns whether that part was
        complete.
        """
        self._looked = 0
        """Number of bytes of `_held` that were already searched for the end of a line or of the headers."""
        self._body = bytearray()
        """The chunks received so far."""
        self._status, self._length, self._keep = 0, 0, False
        self._spoiled = False
        self.idle_since = 0.0
        """The time, by `time.monotonic`, at which the owner put the connection back into its pool."""

    # ------------------------------------------------------------------------------------------ client interface

    @property
    def usable(self) -> bool:
        """Whether the connection can send another request."""
        return not (self._spoiled or self._transport.is_closing())

    def ask(self, *parts: bytes | bytearray) -> asyncio.Future[RawAnswer]:
        """Send a request that consists of these parts, and return a future of its response.

        The caller may change the parts as soon as this method has returned.
        """
        answer = self._loop.create_future()
        if not self.usable:
            answer.set_exception(ConnectionResetError("the server closed the connection before the request was sent"))
            return answer
        self._answer = answer
        if sum(map(len, parts)) <= _JOINED:
            self._transport.write(b"".join(parts))
        else:
            for part in parts:
                self._transport.write(memoryview(bytes(part)))
        return answer

    def abort(self) -> None:
        """Close the connection at once. A pending response fails."""
        self._transport.abort()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    # ------------------------------------------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        try:
            while self._held and self._answer is not None and self._read():
                pass
        except WireError as error:
            self._fail(error)
        if self._held and self._answer is None:
            self._spoiled = True
            self._transport.abort()

    def eof_received(self) -> None:
        if self._answer is not None and self._read == self._read_rest:
            self._give(self._held)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the server closed the connection before it responded"))

    def _give(self, body: bytearray) -> None:
        """Complete the pending response and get ready for the next one."""
        answer, self._answer, self._read = self._answer, None, self._read_head
        if answer is not None and not answer.done():
            # If bytes of the request are still unsent, they would precede the next request on the connection. It
            # can't be reused then.
            keep = self._keep and not self._transport.get_write_buffer_size()
            answer.set_result(RawAnswer(self._status, body, keep))

    def _fail(self, error: Exception) -> None:
        answer, self._answer, self._spoiled = self._answer, None, True
        if answer is not None and not answer.done():
            answer.set_exception(error)

    # ------------------------------------------------------------------------------------------ parts of a response

    def _read_head(self) -> bool:
        head = self._until(b"\r\n\r\n")
        if head is None:
            if not self._held.startswith(b"HTTP/1."[: len(self._held)]):
                raise WireError(f"the server's response is not HTTP/1: {self._held[:80].decode('latin-1')!r}")
            return False
        self._status, self._keep, fields = _parsed(head)
        if 100 <= self._status < 200:
            return True
        length, chunked = fields.get("content-length"), _is_chunked(fields)
        if self._status in (204, 304):
            length, chunked = "0", False  # These responses have no body, whatever the headers say.
        if chunked:
            self._keep = self._keep and length is None
            self._body, self._read = bytearray(), self._read_size
        elif length is not None:
            self._length, self._read = _number(length, 10), self._read_body
            return self._read_body()  # The body may be empty.
        else:
            self._keep, self._read = False, self._read_rest
        return True

    def _read_body(self) -> bool:
        held, length = self._held, self._length
        if len(held) < length:
            return False
        if len(held) == length:
            self._held = bytearray()
            self._give(held)
        else:
            self._give(self._taken(length))
        return True

    def _read_rest(self) -> bool:
        return False  # The body ends when the connection closes.

    def _read_size(self) -> bool:
        line = self._until(b"\r\n")
        if line is None:
            return False
        self._length = _number(line.partition(b";")[0].decode("latin-1").strip(), 16)
        self._read = self._read_chunk if self._length else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if len(self._held) < self._length + 2:
            return False
        self._body += self._taken(self._length)
        if self._taken(2) != b"\r\n":
            raise WireError("a chunk of the server's response is longer than its stated size")
        self._read = self._read_size
        return True

    def _read_trailer(self) -> bool:
        """Read and drop one trailer line."""
        line = self._until(b"\r\n")
        if line is not None and not line:
            self._give(self._body)
        return line is not None

    def _until(self, mark: bytes) -> bytearray | None:
        """Take the bytes before a delimiter from `_held`, and drop the delimiter.

        Returns:
            The bytes, or None if the delimiter hasn't arrived yet.
        """
        end = self._held.find(mark, max(self._looked - len(mark) + 1, 0))
        self._looked = 0 if end >= 0 else len(self._held)
        if max(end, self._looked) > _HEAD_LIMIT:
            raise WireError(f"a line or the headers of the server's response exceed {_HEAD_LIMIT} bytes")
        if end < 0:
            return None
        line = self._taken(end)
        del self._held[: len(mark)]
        return line

    def _taken(self, length: int) -> bytearray:
        taken = self._held[:length]
        del self._held[:length]
        return taken


def _parsed(head: bytearray) -> tuple[int, bool, Mapping[str, str]]:
    """Return the status, whether the connection stays open, and the headers.

    Raises:
        WireError: If the head is malformed.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    status, stays_open = _status(first)
    fields: dict[str, str] = {}
    for line in lines:
        name, value = _field(line)
        if name in _ONCE and fields.get(name, value) != value:
            raise _wrong_field(line)
        fields[name] = value
    if "connection" in fields:
        said = fields["connection"].lower()
        return status, "close" not in said if stays_open else "keep-alive" in said, fields
    return status, stays_open, fields


@lru_cache(_LINES)
def _status(line: str) -> tuple[int, bool]:
    """Parse a status line; return the status, and whether its HTTP version keeps connections open by default."""
    version, status = line[:8], line[9:12]
    framed = version in ("HTTP/1.1", "HTTP/1.0") and line[8:9] == " " and line[12:13] in ("", " ")
    if not (framed and len(status) == 3 and _DIGITS[10].issuperset(status)):
        raise WireError(f"the server's response is not HTTP/1: {line[:80]!r}")
    return int(status), version == "HTTP/1.1"


@lru_cache(_LINES)
def _field(line: str) -> tuple[str, str]:
    """Return a header's name in lower case, and its value."""
    name, colon, value = line.partition(":")
    if not colon or "\r" in line or "\n" in line:
        raise _wrong_field(line)
    return name.strip().lower(), value.strip()


def _wrong_field(line: str) -> WireError:
    return WireError(f"the server's response has an invalid header: {line[:80]!r}")


def _is_chunked(fields: Mapping[str, str]) -> bool:
    """Return whether the body is chunked.

    Raises:
        WireError: If the response has an encoding that wasn't requested and can't be read.
    """
    if fields.keys().isdisjoint(_CODINGS):
        return False
    for name in _CODINGS:
        coding = fields.get(name, "identity").lower()
        if coding not in ("identity", "chunked" if name == "transfer-encoding" else ""):
            raise WireError(f"the server's response has the {name} {coding[:40]!r}, which was not requested")
    return fields.get("transfer-encoding", "").lower() == "chunked"


def _number(text: str, base: int) -> int:
    """Parse a length as HTTP writes it. `int()` alone would also accept a sign, underscores and a prefix."""
    with suppress(ValueError):
        if text and _DIGITS[base].issuperset(text):
            return int(text, base)
    raise WireError(f"the server's response has an invalid length: {text[:40]!r}")
