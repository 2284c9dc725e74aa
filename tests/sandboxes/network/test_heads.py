"""How the proxy parses a request: strictly, and exactly as the next parser will."""

import h11
import pytest
from hypothesis import example, given, strategies as st

from agentgym.sandboxes.network.heads import Malformed, Request, for_client, parse_request


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([*lines, b"", b""])


def sent_on(request: Request) -> bytes:
    """Return the bytes of a request that the host receives."""
    return h11.Connection(h11.CLIENT).send(request.for_host())


def test_a_forwarded_request_names_the_host_that_was_checked() -> None:
    request = parse_request(
        head(
            b"GET http://a.org/x?y=1 HTTP/1.1",
            b"Host: evil.com",
            b"Accept: */*",
            b"Connection: keep-alive, x-secret",
            b"X-Secret: 1",
            b"Proxy-Authorization: Basic abc",
            b"Upgrade: h2c",
        )
    )
    assert (request.method, request.host, request.port, request.path) == ("GET", "a.org", 80, "/x?y=1")
    assert sent_on(request) == head(b"GET /x?y=1 HTTP/1.1", b"Host: a.org", b"Accept: */*", b"Connection: close")


def test_a_forwarded_request_names_the_address_and_port_that_were_checked() -> None:
    request = parse_request(head(b"POST http://[FD00::5]:81 HTTP/1.0", b"Content-Length: 3"))
    assert (request.host, request.port, request.path) == ("fd00::5", 81, "/")
    expected = head(b"POST / HTTP/1.1", b"Host: [fd00::5]:81", b"Content-Length: 3", b"Connection: close")
    assert sent_on(request) == expected


@pytest.mark.parametrize("length", [b"Content-Length: 3", b"Transfer-Encoding: chunked"])
def test_no_request_loses_the_length_of_its_body(length: bytes) -> None:
    request = parse_request(
        head(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", length, b"Connection: content-length, transfer-encoding")
    )
    assert b"\r\n" + length + b"\r\n" in sent_on(request)


def test_connect_requests_name_a_host_and_a_port() -> None:
    request = parse_request(head(b"CONNECT A.org.:443 HTTP/1.1", b"Host: evil.com:443"))
    assert (request.is_tunnel, request.host, request.port) == (True, "a.org", 443)


@pytest.mark.parametrize(
    "wrong",
    [
        head(b"GET / HTTP/1.1", b"Host: a.org"),
        head(b"GET https://a.org/ HTTP/1.1", b"Host: a.org"),
        head(b"GET ftp://a.org/ HTTP/1.1", b"Host: a.org"),
        head(b"GET http://a.org@evil.com/ HTTP/1.1", b"Host: a.org"),
        head(b"GET http://a.org\\@evil.com/ HTTP/1.1", b"Host: a.org"),
        head(b"GET http://a.org#@evil.com/ HTTP/1.1", b"Host: a.org"),
        head(b"GET http://2130706433/ HTTP/1.1", b"Host: a.org"),
        head(b"GET http:///a.org HTTP/1.1", b"Host: a.org"),
        head(b"GET  http://a.org/ HTTP/1.1", b"Host: a.org"),
        head(b"GET http://a.org/ HTTP/2.0", b"Host: a.org"),
        head(b"GET http://a.org/", b"Host: a.org"),
        head(b"CONNECT a.org HTTP/1.1", b"Host: a.org"),
        head(b"CONNECT http://a.org:443 HTTP/1.1", b"Host: a.org"),
        head(b"CONNECT a.org:443@evil.com:443 HTTP/1.1", b"Host: a.org"),
        head(b"CONNECT a.org:443 HTTP/1.1", b"Host: a.org", b"Content-Length: 5"),
        head(b"CONNECT a.org:443 HTTP/1.1", b"Host: a.org", b"Transfer-Encoding: chunked"),
        head(b"POST http://a.org/ HTTP/1.0", b"Host: a.org", b"Transfer-Encoding: chunked"),
        head(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", b"Content-Length: 5", b"Content-Length: 6"),
        head(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        head(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", b"Transfer-Encoding: gzip, chunked"),
        head(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", b"Content-Length: +5"),
        head(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", b"Content-Length: 5,5"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"Content-Length : 5"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b" folded"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"A: b\nHost: evil.com"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"A: b\rHost: evil.com"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"A: \0"),
        head(b"GET http://a.org/\nHost: x HTTP/1.1", b"Host: a.org"),
        head(b"GET http://a.org/\xe2 HTTP/1.1", b"Host: a.org"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", *[b"A: b"] * 101),
        head(b"GET http://a.org/ HTTP/1.1"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"HOST: 169.254.169.254"),
        head(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", b"Content-Length: 5", b"Content-Length: 5"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"A: \x01"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"Content-Length: 5\r\n folded"),
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\n",
        b"GET http://a.org/ HTTP/1.1\nHost: a.org\n\n",
    ],
)
def test_requests_that_parsers_could_read_differently_are_refused(wrong: bytes) -> None:
    with pytest.raises(Malformed):
        parse_request(wrong)


@example(b"A:1")  # a valid authority: a tunnel, whose head is not sent on
@given(st.binary(max_size=300) | st.text("GET CONHP:/.1@[]#?\\%a\t\r\n", max_size=80).map(str.encode))
def test_invalid_requests_raise_only_malformed(body: bytes) -> None:
    for data in (
        body,
        head(body),
        head(b"GET http://" + body + b"/ HTTP/1.1", b"Host: h"),
        head(b"GET http://a.org/ HTTP/1.1", b"Host: h", body),
        head(b"CONNECT " + body + b" HTTP/1.1", b"Host: h"),
    ):
        try:
            request = parse_request(data)
        except Malformed:
            continue
        assert request.is_tunnel or sent_on(request).count(b"\r\n\r\n") == 1


def test_responses_close_the_connection() -> None:
    headers = [("Connection", "keep-alive"), ("Keep-Alive", "timeout=5"), ("A", "b")]
    answer = for_client(h11.Response(status_code=200, headers=headers, reason="OK"))
    assert answer.headers.raw_items() == [(b"A", b"b"), (b"Connection", b"close")]
    assert (answer.status_code, answer.reason) == (200, b"OK")
