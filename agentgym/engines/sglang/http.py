"""JSON over HTTP/1.1 without an HTTP library, on one keep-alive connection for each request in flight.

Each request is written in one call, and its response is parsed as it arrives (`HttpLink`). The caller awaits a single
future. The client is meant for inference servers, so it supports no redirects, cookies, compression or proxies.
"""

import asyncio
import importlib
import json
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from agentgym.engines.http_link import HttpLink

_fast: Callable[[bytearray], Any] | None = None
with suppress(ImportError):  # orjson is optional. If it is installed, decoding takes a fifth of the time.
    _fast = importlib.import_module("orjson").loads

_IDLE_S = 2.0
"""Maximum number of seconds for which a connection may be idle and still be reused. Servers close idle connections
after 5 s, and a request must not be sent on a connection that is being closed.
"""

encoded = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes a value as compact JSON."""


class Answer(NamedTuple):
    """The status and the body of an HTTP response.

    The body is a decoded value if it is JSON, otherwise text, or None if it is empty.
    """

    status: int
    body: Any


class JsonClient:
    """A client of one server. Its methods may be called concurrently from one event loop.

    Calls raise ConnectionError if the server can't be reached, closes the connection or doesn't respond in time, and
    WireError if its response isn't HTTP. Cancelling a call closes its connection, so the server notices the
    cancellation.

    Raises:
        ValueError: If the URL or the API key is invalid.
    """

    def __init__(self, url: str, *, connect_s: float = 10.0, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: must be http://host:port, got {url!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: must be printable ASCII in one line")  # Other characters could inject headers.
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._fields = (
            f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nAccept: application/json\r\n"
            f"{key}Content-Type: application/json\r\nContent-Length: "
        )
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_s = connect_s
        self._idle: list[HttpLink] = []
        self._busy: set[HttpLink] = set()

    def get(self, path: str, *, timeout_s: float | None = None) -> Coroutine[Any, Any, Answer]:
        """Send a GET request for a path under the server's URL."""
        return self._ask("GET", path, (), timeout_s)

    def post(self, path: str, payload: Any, *, timeout_s: float | None = None) -> Coroutine[Any, Any, Answer]:
        """Send a POST request to a path under the server's URL.

        Args:
            path: The path.
            payload: A value to encode as JSON, or bytes that are JSON already.
            timeout_s: Timeout of the request in seconds; None for no limit.
        """
        body = payload if isinstance(payload, bytes) else encoded(payload).encode()
        return self._ask("POST", path, (body,), timeout_s)

    def post_parts(self, path: str, *parts: bytes | bytearray) -> Coroutine[Any, Any, Answer]:
        """Send a POST request whose body, the joined parts, is JSON.

        The bytes are copied only once, when they are sent.
        """
        return self._ask("POST", path, parts, None)

    def close(self) -> None:
        """Close every connection. Calls in flight fail with ConnectionError."""
        for link in self._idle:
            link.abort()
        self._idle.clear()
        for link in self._busy:
            link.abort()

    def _ask(
        self, method: str, path: str, body: Sequence[bytes | bytearray], timeout_s: float | None
    ) -> Coroutine[Any, Any, Answer]:
        head = f"{method} {self._path}{path}{self._fields}{sum(map(len, body))}\r\n\r\n".encode()
        asking = self._exchange(path, head, *body)
        return asking if timeout_s is None else self._within(timeout_s, path, asking)

    async def _within(self, timeout_s: float, path: str, asking: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await asking
        except TimeoutError:
            raise ConnectionError(f"{self.url}{path}: no response within {timeout_s:g} s") from None

    async def _exchange(self, path: str, *request: bytes | bytearray) -> Answer:
        link: HttpLink | None = None
        try:
            link = self._fresh() or await self._connected()
            self._busy.add(link)
            status, content, keep = await link.ask(*request)
        except BaseException as error:
            if link is not None:
                self._busy.discard(link)
                link.abort()
            if isinstance(error, OSError | EOFError):
                timed_out = "the connection timed out" if isinstance(error, TimeoutError) else type(error).__name__
                raise ConnectionError(f"{self.url}{path}: {str(error) or timed_out}") from error
            raise
        self._busy.discard(link)
        if keep and link.usable:  # Both the server and this client keep it open.
            link.idle_since = monotonic()
            self._idle.append(link)
        else:
            link.close()
        return Answer(status, _decoded(content))

    def _fresh(self) -> HttpLink | None:
        """Return the idle connection that was used last, or None if none was used recently enough."""
        oldest = monotonic() - _IDLE_S
        while self._idle:
            link = self._idle.pop()
            if link.idle_since >= oldest and link.usable:
                return link
            link.abort()
        return None

    async def _connected(self) -> HttpLink:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s) as limit:
                _, link = await loop.create_connection(lambda: HttpLink(loop), self._host, self._port, ssl=self._tls)
        except TimeoutError:  # either our own timeout or the kernel's limit for connecting
            if not limit.expired():
                raise
            raise ConnectionError(f"no connection within {self._connect_s:g} s") from None
        return link


def _decoded(body: bytearray) -> Any:
    if _fast is not None:
        try:
            return _fast(body)
        except ValueError:
            pass  # Not JSON, or JSON that only Python's decoder accepts, such as NaN.
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        return body.decode(errors="replace") if body.strip() else None
