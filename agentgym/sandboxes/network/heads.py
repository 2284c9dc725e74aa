"""The heads of HTTP/1 messages: a strict parser for requests to a proxy, and the heads that the proxy forwards."""

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from agentgym.sandboxes.network.rules import parse_authority

MAX_HEAD = 32 << 10
MAX_FIELDS = 100
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|[^\t\r\n\x20-\x7e\x80-\xff]")
"""Matches text in a head that h11 accepts but other parsers may not.

Such text is an unusual line end, a folded line, or a control character.
"""
_LENGTHS = re.compile(rb"\n(?:content-length|transfer-encoding):([^\r]*)", re.IGNORECASE)
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_OF_ONE_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer upgrade expect "
    b"host".split()
)


class Malformed(Exception):
    """A message that is not forwarded, because it is not in the strict form that the proxy accepts."""


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request to a proxy."""

    method: str
    host: str
    port: int
    path: str
    """The path and query at the host; "" for CONNECT."""
    fields: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    connection: h11.Connection = field(repr=False)
    """The client's connection, which reads the body and writes the response."""

    @property
    def is_tunnel(self) -> bool:
        """Whether the bytes after the head go to the host unchanged."""
        return self.method == "CONNECT"

    def for_host(self) -> h11.Request:
        """Return the head to send to the host.

        Its Host field is always the host's name, and the connection closes after the response.
        """
        name = f"[{self.host}]" if ":" in self.host else self.host
        authority = name if self.port == 80 else f"{name}:{self.port}"
        fields = [(b"Host", authority.encode()), *self.fields, (b"Connection", b"close")]
        return h11.Request(method=self.method, target=self.path, headers=fields)


def parse_request(head: bytes) -> Request:
    """Parse the head of a request, including its final empty line.

    The target is `host:port` for CONNECT, and a full http:// URL for other methods.

    Raises:
        Malformed: If the head is invalid, or if two parsers could read it differently.
    """
    if _AMBIGUOUS.search(head):
        raise Malformed("a line of the head does not end with CR LF, is folded, or contains a control character")
    lengths = _LENGTHS.findall(head)
    if len(lengths) > 1 or b"," in b"".join(lengths):
        raise Malformed("the head has more than one body length")
    connection = h11.Connection(h11.SERVER, MAX_HEAD)
    connection.receive_data(head)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise Malformed(str(error)[:200]) from None
    if not isinstance(event, h11.Request):
        raise Malformed("the head does not end with an empty line")
    if event.http_version not in (b"1.0", b"1.1") or len(event.headers) > MAX_FIELDS:
        raise Malformed(f"the request is neither HTTP/1.0 nor HTTP/1.1, or has over {MAX_FIELDS} headers")
    if event.http_version == b"1.0" and b"transfer-encoding" in dict(event.headers):
        raise Malformed("the body is chunked, which HTTP/1.0 does not support")
    method, target = event.method.decode(), event.target.decode()
    try:
        host, port, path = (*parse_authority(target), "") if method == "CONNECT" else _http_target(target)
    except ValueError as error:
        raise Malformed(f"invalid target: {error}") from error
    if method == "CONNECT" and not isinstance(connection.next_event(), h11.EndOfMessage):
        raise Malformed("a CONNECT request must not have a body")
    return Request(method, host, port, path, _passed_on(event), connection)


def _http_target(target: str) -> tuple[str, int, str]:
    if not target.lower().startswith("http://"):
        raise ValueError("expected a URL that starts with http://, or for CONNECT a host and port")
    if "#" in target or "\\" in target:
        raise ValueError("it contains a character that is invalid in a URL")
    url = urlsplit(target)
    if "@" in url.netloc:
        raise ValueError("it contains a user name")
    host, port = parse_authority(url.netloc, 80)
    return host, port, (url.path or "/") + (f"?{url.query}" if "?" in target else "")


def _passed_on(request: h11.Request) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header fields for the host, without those meant for the proxy or named in the Connection field."""
    named = b",".join(value for name, value in request.headers if name == b"connection").lower().split(b",")
    own = _OF_ONE_HOP.union(name.strip() for name in named) - _FRAMING
    return tuple((name, value) for name, value in request.headers.raw_items() if name.lower() not in own)


def for_client(answer: h11.Response) -> h11.Response:
    """Return the head of a host's response, changed for the client: it announces that the connection will close."""
    hidden = (b"connection", b"keep-alive", b"proxy-connection", b"upgrade")
    kept = [(name, value) for name, value in answer.headers.raw_items() if name.lower() not in hidden]
    headers = [*kept, (b"Connection", b"close")]
    return h11.Response(status_code=answer.status_code, headers=headers, reason=answer.reason)
