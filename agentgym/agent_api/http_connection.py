"""The server's side of an HTTP/1.1 connection, over any transport. h11 parses and writes the bytes.

The client isn't trusted. The head, headers, chunks and body of each request are limited. A request is read piece by
piece, so that the event loop can run other work in between.
"""

import asyncio
from http import HTTPStatus

import h11

from agentgym.agent_api.http import Handle, HttpAnswer, HttpRequest

MAX_HEAD = 16 << 10
"""Maximum number of bytes in a request's first line and headers, and in its trailers."""
MAX_HEADERS = 100
MAX_BODY = 8 << 20
"""Maximum number of bytes in a request's body."""
FREE_CHUNKS = 1000
"""Number of chunks, of any size, that every body may have. More chunks must have CHUNK_BYTES bytes on average."""
CHUNK_BYTES = 1 << 10
"""Bytes of the body that allow one more chunk in addition to the first FREE_CHUNKS."""
_PIECE = 16 << 10
"""Maximum number of bytes that are passed to h11 in one call."""
_EVENTS = 256
"""Number of h11 events to process before other work of the event loop gets a turn."""


class MalformedRequest(Exception):
    """Raised if data isn't an HTTP/1.1 request, or is too large."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HttpConnection(asyncio.Protocol):
    """One connection of a client. Each request is answered before the next one is read.

    If the client hangs up, its request is cancelled.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._unread = bytearray()
        """Received bytes that aren't passed to h11 yet."""
        self._given = 0
        """Number of bytes that were passed to h11 for the request that is being read or answered."""
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._chunks = 0
        self._next: asyncio.Handle | None = None
        """The scheduled call of `_read` that continues a request, or None if none is scheduled."""
        self._answering: asyncio.Task[None] | None = None
        self._closed = False
        self._transport: asyncio.Transport

    @property
    def held(self) -> int:
        """Number of bytes of requests that aren't answered yet."""
        return len(self._unread) + self._given

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, of which only `write` and `close` are used."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Accept bytes of requests. Hang up if the bytes that aren't read yet exceed the maximum size of a request."""
        if self._closed:
            return
        self._unread += data
        if len(self._unread) > MAX_HEAD + MAX_BODY:
            self._hang_up()
        elif self._answering is None and self._next is None:
            self._read()

    def eof_received(self) -> bool:
        """Return False, which closes the connection. A client that stops sending counts as having hung up."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the request in progress."""
        self._stop()

    async def close(self) -> None:
        """Hang up, cancel the request in progress, and wait for its end."""
        self._hang_up()
        if self._answering is not None:
            await asyncio.wait([self._answering])

    def _hang_up(self) -> None:
        self._transport.close()
        self._stop()

    def _stop(self) -> None:
        """Stop reading, and cancel the request in progress."""
        self._closed = True
        self._unread.clear()
        if self._next is not None:
            self._next.cancel()
        if self._answering is not None:
            self._answering.cancel()

    def _read(self) -> None:
        """Read some of the received bytes. Once a request is complete, start to answer it."""
        self._next = None
        try:
            for _ in range(_EVENTS):
                event = self._h11.next_event()
                if event is h11.NEED_DATA:
                    if not self._unread:
                        return
                    self._feed()
                elif self._take(event):
                    return
        except (h11.RemoteProtocolError, MalformedRequest) as error:
            self._refuse(error)
            return
        self._next = asyncio.get_running_loop().call_soon(self._read)

    def _feed(self) -> None:
        piece = bytes(self._unread[:_PIECE])
        del self._unread[:_PIECE]
        self._given += len(piece)
        self._h11.receive_data(piece)

    def _take(self, event: object) -> bool:
        """Process an h11 event of the request, and return whether it was the request's last one."""
        if isinstance(event, h11.Request):
            self._begin(event)
        elif isinstance(event, h11.Data):
            self._add(event)
        elif isinstance(event, h11.EndOfMessage):
            assert self._head is not None
            request = _whole(self._head, bytes(self._body))
            self._body.clear()
            self._answering = asyncio.get_running_loop().create_task(self._answer(request))
            return True
        return False

    def _begin(self, head: h11.Request) -> None:
        self._head, self._chunks = head, 0
        if head.http_version not in (b"1.0", b"1.1"):
            raise MalformedRequest(505, f"HTTP/{head.http_version.decode()}: use HTTP/1.1")
        if len(head.headers) > MAX_HEADERS:
            raise MalformedRequest(
                431, f"the request has {len(head.headers)} headers, but only {MAX_HEADERS} are allowed"
            )
        headers = dict(head.headers)
        length = headers.get(b"content-length")
        if length is not None and b"transfer-encoding" in headers:
            raise MalformedRequest(400, "content-length and transfer-encoding: send one of them, not both")
        if int(length or 0) > MAX_BODY:
            raise MalformedRequest(413, _TOO_LARGE)
        if self._h11.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._transport.write(self._h11.send(go_on))

    def _add(self, data: h11.Data) -> None:
        self._body += data.data
        self._chunks += data.chunk_start
        if len(self._body) > MAX_BODY:
            raise MalformedRequest(413, _TOO_LARGE)
        if self._chunks > FREE_CHUNKS + len(self._body) // CHUNK_BYTES:
            raise MalformedRequest(
                400,
                f"beyond the first {FREE_CHUNKS}, chunks must have {CHUNK_BYTES} bytes on average; send larger ones",
            )

    def _refuse(self, error: h11.RemoteProtocolError | MalformedRequest) -> None:
        """Respond with the reason why a request can't be read to its end, and hang up."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            hint = error.status if isinstance(error, MalformedRequest) else error.error_status_hint
            self._send(HttpAnswer(status=hint, body=str(error)[:200].encode(), headers={"connection": "close"}))
        self._hang_up()

    async def _answer(self, request: HttpRequest) -> None:
        self._send(await self._handle(request))
        self._answering = None
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._hang_up()
            return
        self._h11.start_next_cycle()
        self._head = None
        self._given = len(self._h11.trailing_data[0])
        self._read()

    def _send(self, answer: HttpAnswer) -> None:
        body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
        headers = [*answer.headers.items(), ("content-length", str(len(body)))]
        reason = HTTPStatus(answer.status).phrase
        written = self._h11.send(h11.Response(status_code=answer.status, headers=headers, reason=reason))
        if self._head is None or self._head.method != b"HEAD":
            written += self._h11.send(h11.Data(data=body))
        self._transport.write(written + self._h11.send(h11.EndOfMessage()))


_TOO_LARGE = f"the body is over {MAX_BODY >> 20} MiB"


def _whole(head: h11.Request, body: bytes) -> HttpRequest:
    return HttpRequest(
        method=head.method.decode(),
        path=_path(head.target.decode()),
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers},
        body=body,
    )


def _path(target: str) -> str:
    """Return the path of a request's target, without the query.

    Clients behind a proxy write the whole URL as the target.
    """
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target.partition("?")[0]
