"""The heads of HTTP/1 messages: a request to a proxy, read strictly, and its form for the host that it names."""

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from agentgym.sandboxes.network.rules import parse_authority

MAX_HEAD = 32 << 10
MAX_FIELDS = 100
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_OF_ONE_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer upgrade expect host "
    b"transfer-encoding content-length".split()
)


class Malformed(Exception):
    """A message that is not HTTP/1 as it is written here, and is not passed on."""


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request to a proxy."""

    method: str
    host: str
    port: int
    path: str
    """The path and query at the host; "" for CONNECT."""
    version: str
    fields: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    length: int | None
    """Bytes of the body; None for a body in chunks."""

    @property
    def is_tunnel(self) -> bool:
        """Whether the bytes behind the head go to the host as they are."""
        return self.method == "CONNECT"

    def for_host(self) -> bytes:
        """Return the head that the host gets: its own name as Host whatever the client said, and one request only."""
        lines = [f"{self.method} {self.path} {self.version}".encode(), b"Host: " + _authority(self.host, self.port)]
        lines += [name + b": " + value for name, value in self.fields]
        if self.length is None:
            lines.append(b"Transfer-Encoding: chunked")
        elif self.length or self.method in ("POST", "PUT", "PATCH"):
            lines.append(b"Content-Length: %d" % self.length)
        return b"\r\n".join([*lines, b"Connection: close", b"", b""])


def _authority(host: str, port: int) -> bytes:
    name = f"[{host}]" if ":" in host else host
    return (name if port == 80 else f"{name}:{port}").encode()


def parse_request(head: bytes) -> Request:
    """Read the head of a request up to and with its empty line; Malformed where two readers could read it differently.

    CONNECT names `host:port`; other methods name a whole http:// address.
    """
    first, *rest = _lines(head)
    words = first.split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Malformed("the first line is not `METHOD TARGET HTTP/1.1`")
    if not _TOKEN.fullmatch(words[0]) or not _TARGET.fullmatch(words[1]):
        raise Malformed("the method or the target holds a character that it may not")
    method, target = words[0].decode(), words[1].decode()
    fields = _fields(rest)
    try:
        host, port, path = _connect_target(target) if method == "CONNECT" else _http_target(target)
    except ValueError as error:
        raise Malformed(f"the target: {error}") from error
    length = _body_length(fields, words[2])
    if method == "CONNECT" and length != 0:
        raise Malformed("CONNECT with a body")
    return Request(method, host, port, path, words[2].decode(), _passed_on(fields), length)


def _lines(head: bytes) -> list[bytes]:
    if not head.endswith(b"\r\n\r\n"):
        raise Malformed("no empty line ends the head")
    lines = head[:-4].split(b"\r\n")
    if any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines):
        raise Malformed("a line does not end with CR LF, or holds a NUL")
    if len(lines) > MAX_FIELDS:
        raise Malformed(f"over {MAX_FIELDS} lines")
    return lines


def _fields(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    found = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Malformed("a line is not `name: value`")
        found.append((name, value.strip(b" \t")))
    return found


def _connect_target(target: str) -> tuple[str, int, str]:
    return *parse_authority(target), ""


def _http_target(target: str) -> tuple[str, int, str]:
    if not target.lower().startswith("http://"):
        raise ValueError("it begins with neither http:// nor, for CONNECT, a host and port")
    if "#" in target or "\\" in target:
        raise ValueError("it holds a character that no address has")
    url = urlsplit(target)
    if "@" in url.netloc:
        raise ValueError("it holds a user")
    host, port = parse_authority(url.netloc, 80)
    return host, port, (url.path or "/") + (f"?{url.query}" if "?" in target else "")


def _body_length(fields: list[tuple[bytes, bytes]], version: bytes) -> int | None:
    lengths = [value for name, value in fields if name.lower() == b"content-length"]
    codings = [value for name, value in fields if name.lower() == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise Malformed("more than one length of the body")
    if codings:
        if codings[0].lower() != b"chunked":
            raise Malformed("another coding of the body than chunked")
        if version == b"HTTP/1.0":
            raise Malformed("a body in chunks, which HTTP/1.0 does not have")
        return None
    if lengths and not re.fullmatch(rb"[0-9]{1,15}", lengths[0]):
        raise Malformed("a length that is no number")
    return int(lengths[0]) if lengths else 0


def _passed_on(fields: list[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """The fields that go to the host: not those of the way to the proxy, nor those that Connection names."""
    named = b",".join(value for name, value in fields if name.lower() == b"connection").lower().split(b",")
    own = _OF_ONE_HOP.union(name.strip() for name in named)
    return tuple((name, value) for name, value in fields if name.lower() not in own)


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of a host's answer, as the client gets it: it says that the connection ends with this answer."""

    head: bytes
    is_interim: bool
    """Whether another head follows, which is the answer; this one is not passed on."""
    length: int | None
    """Bytes of the body; None for all until the host closes the connection."""


def parse_answer(head: bytes, method: str) -> Answer:
    """Read the head of an answer to a request of this method; Malformed where it is no HTTP/1."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    status = re.match(rb"HTTP/1\.[01] ([1-5][0-9][0-9])( |$)", first)
    if status is None:
        raise Malformed("the host's answer is no HTTP/1")
    hidden = (b"connection", b"keep-alive", b"proxy-connection", b"upgrade")
    named = [(line.partition(b":")[0].strip().lower(), line) for line in lines]
    kept = [line for name, line in named if name not in hidden]
    lengths = {line.partition(b":")[2].strip() for name, line in named if name == b"content-length"}
    length = None
    if method == "HEAD" or status[1] in (b"204", b"304"):
        length = 0
    elif len(lengths) == 1 and re.fullmatch(rb"[0-9]{1,15}", text := lengths.pop()):
        length = None if b"transfer-encoding" in dict(named) else int(text)
    sent = b"\r\n".join([first, *kept, b"Connection: close", b"", b""])
    return Answer(sent, status[1].startswith(b"1"), length)
