"""The proxy's reading of a request: strict, and the same for whoever reads it next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.sandboxes.network.heads import Malformed, parse_answer, parse_request


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([*lines, b"", b""])


def test_a_request_is_sent_on_with_the_name_of_the_host_that_was_checked() -> None:
    request = parse_request(
        head(
            b"GET http://a.org/x?y=1 HTTP/1.1",
            b"Host: evil.com",
            b"HOST: 169.254.169.254",
            b"Accept: */*",
            b"Connection: keep-alive, x-secret",
            b"X-Secret: 1",
            b"Proxy-Authorization: Basic abc",
            b"Upgrade: h2c",
        )
    )
    assert (request.method, request.host, request.port, request.path) == ("GET", "a.org", 80, "/x?y=1")
    assert request.for_host() == head(b"GET /x?y=1 HTTP/1.1", b"Host: a.org", b"Accept: */*", b"Connection: close")


def test_a_port_and_an_address_are_named_as_they_were_checked() -> None:
    request = parse_request(head(b"POST http://[FD00::5]:81 HTTP/1.0", b"Content-Length: 3"))
    assert (request.host, request.port, request.path, request.length) == ("fd00::5", 81, "/", 3)
    assert b"\r\nHost: [fd00::5]:81\r\n" in request.for_host()


def test_a_tunnel_is_asked_for_by_host_and_port() -> None:
    request = parse_request(head(b"CONNECT A.org.:443 HTTP/1.1", b"Host: evil.com:443"))
    assert (request.is_tunnel, request.host, request.port) == (True, "a.org", 443)


@pytest.mark.parametrize(
    "wrong",
    [
        head(b"GET / HTTP/1.1", b"Host: a.org"),
        head(b"GET https://a.org/ HTTP/1.1"),
        head(b"GET ftp://a.org/ HTTP/1.1"),
        head(b"GET http://a.org@evil.com/ HTTP/1.1"),
        head(b"GET http://a.org\\@evil.com/ HTTP/1.1"),
        head(b"GET http://a.org#@evil.com/ HTTP/1.1"),
        head(b"GET http://2130706433/ HTTP/1.1"),
        head(b"GET http:///a.org HTTP/1.1"),
        head(b"GET  http://a.org/ HTTP/1.1"),
        head(b"GET http://a.org/ HTTP/2.0"),
        head(b"GET http://a.org/"),
        head(b"CONNECT a.org HTTP/1.1"),
        head(b"CONNECT http://a.org:443 HTTP/1.1"),
        head(b"CONNECT a.org:443@evil.com:443 HTTP/1.1"),
        head(b"CONNECT a.org:443 HTTP/1.1", b"Content-Length: 5"),
        head(b"CONNECT a.org:443 HTTP/1.1", b"Transfer-Encoding: chunked"),
        head(b"POST http://a.org/ HTTP/1.0", b"Transfer-Encoding: chunked"),
        head(b"POST http://a.org/ HTTP/1.1", b"Content-Length: 5", b"Content-Length: 6"),
        head(b"POST http://a.org/ HTTP/1.1", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        head(b"POST http://a.org/ HTTP/1.1", b"Transfer-Encoding: gzip, chunked"),
        head(b"POST http://a.org/ HTTP/1.1", b"Content-Length: +5"),
        head(b"POST http://a.org/ HTTP/1.1", b"Content-Length: 5,5"),
        head(b"GET http://a.org/ HTTP/1.1", b"Content-Length : 5"),
        head(b"GET http://a.org/ HTTP/1.1", b" folded"),
        head(b"GET http://a.org/ HTTP/1.1", b"A: b\nHost: evil.com"),
        head(b"GET http://a.org/ HTTP/1.1", b"A: b\rHost: evil.com"),
        head(b"GET http://a.org/ HTTP/1.1", b"A: \0"),
        head(b"GET http://a.org/\nHost: x HTTP/1.1"),
        head(b"GET http://a.org/\xe2 HTTP/1.1"),
        head(b"GET http://a.org/ HTTP/1.1", *[b"A: b"] * 101),
        b"GET http://a.org/ HTTP/1.1\n\n",
    ],
)
def test_what_two_readers_could_read_differently_is_refused(wrong: bytes) -> None:
    with pytest.raises(Malformed):
        parse_request(wrong)


@given(st.binary(max_size=300) | st.text("GET CONHP:/.1@[]#?\\%a\t\r\n", max_size=80).map(str.encode))
def test_no_bytes_make_another_error_than_malformed(body: bytes) -> None:
    for data in (
        body,
        head(body),
        head(b"GET http://" + body + b"/ HTTP/1.1"),
        head(b"CONNECT " + body + b" HTTP/1.1"),
    ):
        try:
            request = parse_request(data)
        except Malformed:
            continue
        assert request.for_host().count(b"\r\n\r\n") == 1


def test_an_answer_says_that_the_connection_ends_with_it() -> None:
    answer = parse_answer(head(b"HTTP/1.1 200 OK", b"Connection: keep-alive", b"Keep-Alive: timeout=5", b"A: b"), "GET")
    assert answer.head == head(b"HTTP/1.1 200 OK", b"A: b", b"Connection: close")
    assert not answer.is_interim


@pytest.mark.parametrize(
    ("method", "lines", "length"),
    [
        ("GET", [b"HTTP/1.1 200 OK", b"Content-Length: 5"], 5),
        ("GET", [b"HTTP/1.1 200 OK"], None),
        ("GET", [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Content-Length: 6"], None),
        ("GET", [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Transfer-Encoding: chunked"], None),
        ("HEAD", [b"HTTP/1.1 200 OK", b"Content-Length: 5"], 0),
        ("GET", [b"HTTP/1.0 304 Not Modified", b"Content-Length: 5"], 0),
    ],
)
def test_an_answer_is_as_long_as_it_says(method: str, lines: list[bytes], length: int | None) -> None:
    assert parse_answer(head(*lines), method).length == length


def test_an_interim_answer_is_told_from_the_answer() -> None:
    assert parse_answer(head(b"HTTP/1.1 103 Early Hints"), "GET").is_interim


@pytest.mark.parametrize("wrong", [b"SSH-2.0-x", b"HTTP/2 200", b"HTTP/1.1 20x OK", b""])
def test_an_answer_that_is_no_http_is_told(wrong: bytes) -> None:
    with pytest.raises(Malformed):
        parse_answer(head(wrong), "GET")
