"""The proxy by itself, in front of servers on this machine: allowed traffic, responses and ended connections."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from agentgym.sandboxes.network import proxy as proxies
from agentgym.sandboxes.network.acceptor import forget_waiting
from agentgym.sandboxes.network.heads import Malformed
from agentgym.sandboxes.network.hello import ENCRYPTED_NAMES, RETRY, server_name
from agentgym.sandboxes.network.proxy import Proxy
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.protocol import NetworkRequest
from tests.sandboxes.network.conftest import Host, host


class Client:
    """The sandbox's side: connections to the proxy."""

    def __init__(self, proxy: Proxy, port: int) -> None:
        self.proxy, self.port = proxy, port

    async def ask(self, *lines: bytes, then: bytes = b"") -> bytes:
        """Send the header lines, adding a Host if there is none, and then `then`; return the full response."""
        if not any(line.startswith(b"Host:") for line in lines):
            lines = (*lines, b"Host: h")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"\r\n".join([*lines, b"", b""]) + then)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    @property
    def log(self) -> Sequence[NetworkRequest]:
        return [record.view() for record in self.proxy.records]


@asynccontextmanager
async def proxy(*hosts: str, mb: int = 1, requests: int = 100) -> AsyncIterator[Client]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Proxy(listener, Allow(*hosts, mb=mb, requests=requests))
        made.start()
        try:
            yield Client(made, listener.getsockname()[1])
        finally:
            await made.stop()


async def test_a_plain_request_reaches_its_host_and_is_logged() -> None:
    async with host() as there, proxy(there.address) as client:
        said = await client.ask(f"GET http://{there.address}/x?y HTTP/1.1".encode(), b"Host: evil.com")
    assert said.endswith(b"Connection: close\r\n\r\nhello")
    assert there.got == [f"GET /x?y HTTP/1.1\r\nHost: {there.address}\r\nConnection: close\r\n\r\n".encode()]
    (request,) = client.log
    assert (request.method, request.host, request.port, request.path) == ("GET", "127.0.0.1", there.port, "/x?y")
    assert (request.outcome, request.why, request.sent) == ("allowed", "", len(there.got[0]))
    assert request.received > 5


async def test_a_tunnel_carries_bytes_unchanged_in_both_directions() -> None:
    async with host() as there, proxy(there.address) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"CONNECT {there.address} HTTP/1.1\r\nHost: h\r\n\r\n\x00\x01".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
        writer.write_eof()
        assert (await reader.read()).endswith(b"hello")
        writer.close()
    assert there.got == [b"\x00\x01"]
    assert [(each.method, each.outcome, each.sent) for each in client.log] == [("CONNECT", "allowed", 2)]


@pytest.mark.parametrize(
    "target",
    [b"GET http://example.org/ HTTP/1.1", b"CONNECT example.org:443 HTTP/1.1", b"CONNECT 127.0.0.1:1 HTTP/1.1"],
)
async def test_an_unlisted_host_is_refused_and_the_error_names_the_list(target: bytes) -> None:
    async with proxy("a.org:81") as client:
        said = await client.ask(target)
    assert said.startswith(b"HTTP/1.1 403 ")
    assert b"is not allowed; allowed: a.org:81" in said
    assert [each.outcome for each in client.log] == ["refused"]


async def test_a_name_that_resolves_to_this_machine_is_refused_unless_listed() -> None:
    async with host() as there:
        async with proxy(f"localhost:{there.port}") as client:
            said = await client.ask(f"CONNECT localhost:{there.port} HTTP/1.1".encode())
            assert b"403" in said
            assert b"which is not a public address" in said
        async with proxy(f"localhost:{there.port}", there.address) as client:
            said = await client.ask(f"GET http://localhost:{there.port}/ HTTP/1.1".encode())
            assert said.endswith(b"hello")


async def test_malformed_requests_are_refused_and_logged() -> None:
    async with proxy("a.org") as client:
        assert (await client.ask(b"GET / HTTP/1.1", b"Host: a.org")).startswith(b"HTTP/1.1 400 ")
        assert (await client.ask(b"\x05\x01\x00")).startswith(b"HTTP/1.1 400 ")
        assert (await client.ask(b"GET http://a.org/ HTTP/1.1", b"A: " + b"x" * 40_000)).startswith(b"HTTP/1.1 400 ")
    assert [each.outcome for each in client.log] == ["malformed"] * 3


async def test_a_second_request_on_the_same_connection_is_not_forwarded() -> None:
    async with host() as there, proxy(there.address) as client:
        line = f"POST http://{there.address}/ HTTP/1.1".encode()
        second = f"GET http://{there.address}/second HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        await client.ask(line, b"Content-Length: 3", then=b"abc" + second)
        await client.ask(line, b"Transfer-Encoding: chunked", then=b"3;x=y\r\nabc\r\n0\r\n\r\n" + second)
    sent = b"".join(there.got)
    assert b"second" not in sent
    assert sent.count(b"abc") == 2
    assert b"3\r\nabc\r\n0\r\n\r\n" in sent


@pytest.mark.parametrize(
    "chunks", [b"3\nabc\n0\n\n", b"-3\r\nabc\r\n0\r\n\r\n", b"0x3\r\nabc\r\n", b"3\r\nabcd\r\n0\r\n\r\n"]
)
async def test_chunks_that_parsers_could_read_differently_end_the_request(chunks: bytes) -> None:
    async with host() as there, proxy(there.address) as client:
        await client.ask(
            f"POST http://{there.address}/ HTTP/1.1".encode(), b"Transfer-Encoding: chunked", then=chunks + b"\r\n" * 3
        )
    assert [each.outcome for each in client.log] == ["cut"]


@asynccontextmanager
async def closing_host(answer: bytes) -> AsyncIterator[Host]:
    """Start a server that answers the first data with `answer` and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield Host(server.sockets[0].getsockname()[1])


@pytest.mark.parametrize(
    ("asked", "answer", "got"),
    [
        ("GET HTTP/1.1", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello, more", b"hello"),
        ("GET HTTP/1.1", b"HTTP/1.1 200 OK\r\n\r\nhello", b"5\r\nhello\r\n0\r\n\r\n"),
        ("GET HTTP/1.0", b"HTTP/1.1 200 OK\r\n\r\nhello", b"hello"),
        ("GET HTTP/1.0", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (
            "GET HTTP/1.1",
            b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            b"hello",
        ),
        ("HEAD HTTP/1.1", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b""),
        ("GET HTTP/1.1", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
    ],
)
async def test_a_response_is_forwarded_up_to_its_declared_length(asked: str, answer: bytes, got: bytes) -> None:
    method, version = asked.split()
    async with closing_host(answer) as there, proxy(there.address) as client:
        said = await client.ask(f"{method} http://{there.address}/ {version}".encode())
    assert said.partition(b"\r\n\r\n")[2] == got
    assert [each.outcome for each in client.log] == ["allowed"]


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 40_000,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
    ],
)
async def test_a_response_that_is_not_http_or_ends_early_is_cut(answer: bytes) -> None:
    async with closing_host(answer) as there, proxy(there.address) as client:
        await client.ask(f"GET http://{there.address}/ HTTP/1.1".encode())
    assert [each.outcome for each in client.log] == ["cut"]
    assert "not HTTP/1.1" in client.log[0].why


def greeting(name: str | None) -> bytes:
    """Return a TLS ClientHello."""
    context = ssl.create_default_context()
    context.check_hostname = False
    said = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname=name).do_handshake()
    return said.read()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (greeting("localhost"), ""),
        (greeting("LOCALHOST"), ""),
        (greeting("evil.com"), "the TLS ClientHello names evil.com, but the tunnel leads to localhost"),
        (greeting(None), "the TLS ClientHello names no host, but the tunnel leads to localhost"),
        (greeting("localhost")[:100], "the TLS ClientHello ends too early"),
        (b"\x16\x03\x01\xff\xff" + bytes(99), "not a TLS ClientHello"),
        (b"\x16\x03\x01\x00\x05" + bytes(5), "not a TLS ClientHello"),
        (b"not tls", "the client must use TLS in the tunnel to localhost:"),
    ],
    ids=["the host", "the host in capitals", "another host", "no host", "cut", "too long", "too short", "no TLS"],
)
async def test_a_tls_tunnel_leads_to_the_host_that_the_client_hello_names(
    monkeypatch: pytest.MonkeyPatch, said: bytes, why: str
) -> None:
    async with host() as there, proxy(f"localhost:{there.port}", there.address) as client:
        monkeypatch.setattr(proxies, "TLS_PORT", there.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"CONNECT localhost:{there.port} HTTP/1.1\r\nHost: h\r\n\r\n".encode() + said)
        writer.write_eof()
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()
    (request,) = client.log
    assert request.outcome == ("cut" if why else "allowed")
    assert request.why.startswith(why)
    assert b"".join(there.got) == (b"" if why else said)


GREETING = greeting("a.org")


@given(st.binary(max_size=400))
def test_an_invalid_client_hello_raises_only_malformed(data: bytes) -> None:
    for record in (data, b"\x01" + len(data).to_bytes(3, "big") + data, GREETING[5:30] + data):
        with suppress(Malformed):
            server_name(record)


async def test_a_response_before_the_end_of_the_body_ends_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with host() as there, proxy(there.address) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"POST http://{there.address}/ HTTP/1.1\r\nHost: h\r\nContent-Length: 999999\r\n\r\nx".encode())
        assert (await reader.read()).endswith(b"hello")
        assert (await client.ask(f"GET http://{there.address}/ HTTP/1.1".encode())).endswith(b"hello")
        writer.close()
    assert [each.outcome for each in client.log] == ["allowed", "allowed"]
    assert caplog.messages == []


async def test_a_request_whose_headers_do_not_end_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "HEAD_S", 0.1)
    async with proxy("a.org") as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET http://a.org/ HTTP/1.1\r\nHost: h\r\nA: ")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
    assert [each.outcome for each in client.log] == ["malformed"]


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "IDLE_S", 0.1)
    async with host() as there, proxy(there.address) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"CONNECT {there.address} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        assert await reader.read() == b"HTTP/1.1 200 Connection established\r\n\r\n"
        writer.close()
    assert [(each.outcome, each.why) for each in client.log] == [("cut", "idle for 0 s")]


async def test_requests_are_cut_at_the_episodes_limit_of_bytes() -> None:
    async with host(b"x" * (2 << 20)) as there, proxy(there.address, mb=1) as client:
        assert len(await client.ask(f"GET http://{there.address}/ HTTP/1.1".encode())) <= 1 << 20
        await client.ask(f"GET http://{there.address}/ HTTP/1.1".encode())
    assert [(each.outcome, each.why) for each in client.log] == [("cut", "more than 1 MB in one episode")] * 2


async def test_an_episode_has_a_limit_on_requests() -> None:
    async with proxy("a.org", requests=2) as client:
        answers = [await client.ask(b"CONNECT b.org:443 HTTP/1.1") for _ in range(3)]
    assert [answer.split()[1] for answer in answers] == [b"403", b"403", b"429"]
    assert len(client.log) == 2


async def test_logged_methods_and_paths_are_truncated() -> None:
    async with host() as there, proxy(there.address) as client:
        await client.ask(f"GET http://{there.address}/begin{'x' * 30_000}end HTTP/1.1".encode())
        await client.ask(f"{'G' * 30_000} http://{there.address}/ HTTP/1.1".encode())
    for request in client.log:
        assert len(request.path) <= 1000
        assert len(request.method) <= 1000
    assert client.log[0].path.startswith("/begin")
    assert client.log[0].path.endswith("end")
    assert b"/begin" + b"x" * 30_000 + b"end" in there.got[0]


async def test_connections_over_the_limit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "CONNECTIONS", 2)
    async with host() as there, proxy(there.address) as client:
        held = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(2)]
        waiting = asyncio.create_task(client.ask(f"GET http://{there.address}/ HTTP/1.1".encode()))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        held[0][1].close()
        assert (await waiting).endswith(b"hello")
        held[1][1].close()


async def test_a_connection_that_waits_when_the_episode_ends_is_closed_unread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = Proxy(listener, Allow("a.org"))
        first.start()
        await first.stop()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"CONNECT a.org:443 HTTP/1.1\r\nHost: h\r\n\r\n")
        await writer.drain()
        assert forget_waiting(listener) == 1
        second = Proxy(listener, Allow("a.org"))
        second.start()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        answer = await Client(second, listener.getsockname()[1]).ask(b"CONNECT b.org:443 HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 403 ")
        await second.stop()
    assert (len(first.records), len(second.records)) == (0, 1)


async def test_a_tunnel_leads_to_port_443_and_to_listed_ports() -> None:
    async with proxy("a.org", "localhost:81") as client:
        said = await client.ask(b"CONNECT a.org:80 HTTP/1.1")
        assert b"403" in said
        assert b"no tunnel to a.org:80: request the full URL (http://a.org/), or list 'a.org:80'" in said
        assert b"resolves to 127.0.0.1" in await client.ask(b"CONNECT localhost:81 HTTP/1.1")
        assert b"is not allowed" in await client.ask(b"CONNECT b.org:80 HTTP/1.1")


def in_records(message: bytes, *sizes: int) -> bytes:
    """Cut a TLS message into records of these sizes and one for the rest."""
    said = b""
    for size in (*sizes, len(message)):
        piece, message = message[:size], message[size:]
        said += b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece
    return said


ASKS_AGAIN = in_records(b"\x02\x00\x00\x28\x03\x03" + RETRY + bytes(6))
ANSWERS = in_records(b"\x02\x00\x00\x28\x03\x03" + bytes(32) + bytes(6))
CHANGE = b"\x14\x03\x03\x00\x01\x01"
EARLY = b"\x17\x03\x03\x00\x04data"
ALERT = b"\x15\x03\x01\x00\x02\x01\x70"


@pytest.mark.parametrize(
    ("answer", "between", "second", "why"),
    [
        (ASKS_AGAIN, b"", "localhost", ""),
        (ASKS_AGAIN, CHANGE + EARLY, "localhost", ""),
        (ALERT + ASKS_AGAIN, b"", "evil.com", "the TLS ClientHello names evil.com, but the tunnel leads to localhost"),
        (ASKS_AGAIN, b"", "evil.com", "the TLS ClientHello names evil.com, but the tunnel leads to localhost"),
        (
            ASKS_AGAIN,
            CHANGE + EARLY,
            "evil.com",
            "the TLS ClientHello names evil.com, but the tunnel leads to localhost",
        ),
        (ANSWERS, b"", "localhost", "the client sent a second TLS ClientHello, but the host did not request one"),
        (in_records(b"\x02\x00\x00\x28", 2), b"", "evil.com", "the host's TLS ServerHello is fragmented"),
    ],
)
@pytest.mark.parametrize("waits", [True, False], ids=["after the answer", "before the answer"])
async def test_every_client_hello_in_a_tunnel_must_name_its_host(
    answer: bytes, between: bytes, second: str, why: str, waits: bool
) -> None:
    first = greeting("localhost")
    async with speaker(answer) as there, proxy(f"localhost:{there.port}", there.address) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"CONNECT localhost:{there.port} HTTP/1.1\r\nHost: h\r\n\r\n".encode() + first)
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionResetError, asyncio.IncompleteReadError):
            if waits:
                await reader.readexactly(len(answer))
            writer.write(between + greeting(second))
            writer.write_eof()
            await reader.read()
        writer.close()
    (request,) = client.log
    assert (request.outcome, request.why) == ("cut" if why else "allowed", why)
    said = b"".join(there.got)
    assert said.startswith(first)
    assert (b"evil" in said, said.count(b"localhost")) == (False, 1 if why else 2)


@asynccontextmanager
async def speaker(answer: bytes) -> AsyncIterator[Host]:
    """Start a server that answers the first data with `answer` and stores everything it receives."""
    made = Host()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.got.append(await reader.read(65536))
        for at in range(len(answer)):  # One byte at a time: no reader may rely on more.
            writer.write(answer[at : at + 1])
            await writer.drain()
        with suppress(ConnectionResetError):
            while more := await reader.read(65536):
                made.got.append(more)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        made.port = server.sockets[0].getsockname()[1]
        yield made


async def test_data_that_a_host_sends_first_reaches_a_client_without_tls() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x16+")
        writer.write(await reader.read(10))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxy(f"localhost:{port}", f"127.0.0.1:{port}") as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(f"CONNECT localhost:{port} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
            assert (await reader.readuntil(b"\x16+")).endswith(b"\x16+")
            writer.write(b"hello")
            assert await reader.read() == b"hello"
            writer.close()


def message(name: str, *extensions: bytes) -> bytes:
    """Return a ClientHello that names this host and has further extensions."""
    listed = b"\x00" + len(name).to_bytes(2, "big") + name.encode()
    named = len(listed).to_bytes(2, "big") + listed
    all_of_them = b"\x00\x00" + len(named).to_bytes(2, "big") + named + b"".join(extensions)
    body = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    body += len(all_of_them).to_bytes(2, "big") + all_of_them
    return b"\x01" + len(body).to_bytes(3, "big") + body


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (40, 20), (1,) * 20])
@pytest.mark.parametrize(("name", "why"), [("localhost", ""), ("evil.com", "the TLS ClientHello names evil.com")])
async def test_a_client_hello_in_several_records_is_read_as_a_whole(
    sizes: tuple[int, ...], name: str, why: str
) -> None:
    said = in_records(message(name), *sizes)
    async with speaker(b"") as there, proxy(f"localhost:{there.port}", there.address) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"CONNECT localhost:{there.port} HTTP/1.1\r\nHost: h\r\n\r\n".encode() + said)
        writer.write_eof()
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()
    assert client.log[0].why.startswith(why)
    assert b"".join(there.got) == (b"" if why else said)


def test_a_client_hello_that_hides_its_host_or_has_trailing_data_is_refused() -> None:
    assert server_name(message("a.org", b"\x12\x34\x00\x00")) == "a.org"
    for kind in ENCRYPTED_NAMES:
        with pytest.raises(Malformed, match="encrypted name"):
            server_name(message("a.org", kind.to_bytes(2, "big") + b"\x00\x00"))
    with pytest.raises(Malformed, match="has trailing data"):
        server_name(message("a.org") + message("evil.com"))


async def test_tls_with_a_hello_retry_request_passes_through(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    answering = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    answering.load_cert_chain(certificate, key)
    answering.set_ecdh_curve("secp384r1")  # The first ClientHello has no key share for this curve.

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=answering) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxy(f"localhost:{port}", f"127.0.0.1:{port}") as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(f"CONNECT localhost:{port} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            await writer.start_tls(ssl.create_default_context(cafile=str(certificate)), server_hostname="localhost")
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()
            assert client.log[0].outcome == "allowed"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Create a key and a certificate for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", *made, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


async def test_a_host_that_refuses_the_connection_is_reported_as_a_failure() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        async with proxy(f"127.0.0.1:{port}") as client:
            said = await client.ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1".encode())
    assert said.startswith(b"HTTP/1.1 502 ")
    assert [each.outcome for each in client.log] == ["failed"]
