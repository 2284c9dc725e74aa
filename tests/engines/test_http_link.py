"""One HTTP connection against everything that a server may send, however its bytes are split."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agentgym.engines.http_link import HttpLink, RawAnswer
from agentgym.engines.sglang.http import JsonClient
from agentgym.errors import WireError
from tests.sandboxes.network.test_proxy import self_signed

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nServer: x\r\n\r\n[1,2,3]"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;name=value\r\n[1,\r\n4\r\n2,3]\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + PLAIN
EMPTY = b"HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n"


@asynccontextmanager
async def served(play: Play) -> AsyncIterator[str]:
    """Yield the URL of a server that handles every connection with `play`."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def rollout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await play(reader, writer)
        finally:
            writer.transport.abort()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.add(asyncio.create_task(rollout(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for _ in range(10):  # a connection may be half accepted, and nothing owns its socket yet
            await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for writer in writers:  # also of a task that was cancelled before it started
        writer.transport.abort()
    await asyncio.sleep(0)


async def request(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    (length,) = [line.partition(":")[2] for line in head.split("\r\n") if line.startswith("Content-Length")]
    return await reader.readexactly(int(length))


class Wire(asyncio.Transport):
    """A transport without a socket that stores the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed, self.unsent = b"", False, 0

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort


async def linked() -> tuple[HttpLink, Wire]:
    link, wire = HttpLink(asyncio.get_running_loop()), Wire()
    link.connection_made(wire)
    return link, wire


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        pytest.param(PLAIN, b"[1,2,3]", id="plain"),
        pytest.param(CHUNKED, b"[1,2,3]", id="chunks"),
        pytest.param(CONTINUED, b"[1,2,3]", id="continued"),
        pytest.param(EMPTY, b"", id="empty"),
    ],
)
async def test_an_answer_is_the_same_wherever_its_bytes_are_split(sent: bytes, body: bytes) -> None:
    link, wire = await linked()
    for cut in range(len(sent) + 1):
        asked = link.ask(b"HEAD", b"BODY")
        for part in filter(None, (sent[:cut], sent[cut:])):
            link.data_received(part)
        assert (await asked)[1:] == (bytearray(body), True)
    asked = link.ask(b"HEAD", b"BODY")
    for i in range(len(sent)):
        assert not asked.done()
        link.data_received(sent[i : i + 1])
    assert (await asked)[1:] == (bytearray(body), True)
    assert link.usable
    assert wire.written == b"HEADBODY" * (len(sent) + 2)


@pytest.mark.parametrize("junk", [PLAIN, b"x", b"\r\n", b"HTTP/1.1 408 Request Timeout\r\n\r\n"])
@pytest.mark.parametrize("sent", [PLAIN, CHUNKED, EMPTY], ids=["plain", "chunks", "empty"])
async def test_unexpected_bytes_make_a_connection_unusable(sent: bytes, junk: bytes) -> None:
    for parts in ([sent + junk], [sent, junk], [sent[:-1], sent[-1:] + junk]):
        link, wire = await linked()
        asked = link.ask(b"", b"")
        for part in parts:
            link.data_received(part)
        assert (await asked).status in (200, 204)
        assert not link.usable
        assert wire.closed


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nA: b\rC: d\r\nContent-Length: 0\r\n\r\n", id="lone_carriage_return"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 0\r\n\r\n", id="lone_line_feed"),
        pytest.param(b"HTTP/1.1 200 OK\r\nno field\r\n\r\n", id="no_colon"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n[]", id="two_lengths"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n[]", id="signed_length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n[]", id="underscored_length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n[]", id="no_length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\n[]\r\n0\r\n\r\n", id="prefixed_size"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n[]\r\n0\r\n\r\n", id="longer_chunk"),
        pytest.param(b"{", id="no_head_at_all"),
        pytest.param(b"SSH-2.0-OpenSSH_9\r\n", id="another_protocol_that_waits"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]", id="compressed"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n[]", id="compressed_transfer"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: notchunked\r\n\r\n[]", id="unknown_transfer"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n2\r\n[]\r\n0\r\n\r\n",
            id="two_transfers",
        ),
        pytest.param(b"HTTP/1.1 2x0 OK\r\n\r\n", id="status"),
        pytest.param(b"HTTP/1.1 2000 OK\r\n\r\n", id="long_status"),
        pytest.param(b"HTTP/2 200 OK\r\n\r\n", id="another_version"),
        pytest.param(b"\0" * (1 << 17), id="zeros"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * (1 << 17), id="endless_size"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * (1 << 17), id="endless_trailer"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 16) + b"\r\n\r\n", id="long_head_at_once"),
    ],
)
async def test_garbage_is_a_wire_error_and_ends_the_connection(sent: bytes) -> None:
    for size in (len(sent), 1000, 1 if len(sent) < 1000 else 100):
        link, _ = await linked()
        asked = link.ask(b"", b"")
        for start in range(0, len(sent), size):
            if not asked.done():
                link.data_received(sent[start : start + size])
        with pytest.raises(WireError):
            await asked
        assert not link.usable


async def test_an_answer_that_breaks_off_anywhere_is_an_os_error() -> None:
    for sent in (PLAIN, CHUNKED, CONTINUED):
        for cut in range(len(sent)):
            link, _ = await linked()
            asked = link.ask(b"", b"")
            if cut:
                link.data_received(sent[:cut])
            link.eof_received()
            link.connection_lost(None)
            with pytest.raises(OSError, match="closed the connection"):
                await asked


async def test_an_answer_without_a_length_ends_only_when_the_server_closes_the_connection() -> None:
    for by_server in (True, False):
        link, _ = await linked()
        asked = link.ask(b"", b"")
        link.data_received(b"HTTP/1.1 200 OK\r\n\r\n[1,")
        link.data_received(b"2]")
        if by_server:
            link.eof_received()
        link.connection_lost(None)
        if by_server:
            assert await asked == RawAnswer(200, bytearray(b"[1,2]"), keep=False)
        else:
            with pytest.raises(OSError, match="closed the connection"):
                await asked


@pytest.mark.parametrize(
    ("sent", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", False),
    ],
)
async def test_a_connection_stays_open_if_the_server_says_so(sent: bytes, keep: bool) -> None:
    link, _ = await linked()
    asked = link.ask(b"", b"")
    link.data_received(sent)
    assert (await asked).keep is keep


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body_has_none_whatever_its_headers_say(status: int) -> None:
    link, _ = await linked()
    asked = link.ask(b"", b"")
    link.data_received(b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\n" % status)
    assert await asked == RawAnswer(status, bytearray(), keep=True)


async def test_an_answer_before_the_request_was_fully_sent_ends_the_connections_use() -> None:
    link, wire = await linked()
    asked = link.ask(b"", b"x" * 100)
    wire.unsent = 50
    link.data_received(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    assert await asked == RawAnswer(413, bytearray(), keep=False)


async def test_a_lost_connection_accepts_no_request() -> None:
    link, wire = await linked()
    wire.abort()
    link.connection_lost(None)
    with pytest.raises(OSError, match="closed the connection"):
        await link.ask(b"", b"")


async def test_refused_headers_stay_refused_and_accepted_ones_are_parsed_again() -> None:
    for _ in range(2):
        for head in (b"HTTP/1.1 2OO OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nno field\r\n\r\n"):
            link, _ = await linked()
            asked = link.ask(b"")
            link.data_received(head)
            with pytest.raises(WireError):
                await asked
    link, wire = await linked()
    for status, length in ((200, 3), (404, 3), (200, 12), (200, 3)):
        asked = link.ask(b"HEAD", b"BODY")
        link.data_received(b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n" % (status, length) + b"x" * length)
        assert await asked == RawAnswer(status, bytearray(b"x" * length), keep=True)
    assert wire.written == b"HEADBODY" * 4


@pytest.mark.parametrize("length", [0, 1 << 16, 1 << 20, (1 << 20) + 1])
async def test_request_parts_are_sent_as_they_were_at_the_time_of_the_request(length: int) -> None:
    link, wire = await linked()
    part = bytearray(b"x" * length)
    link.ask(b"HEAD", b"[", part, b"]")
    part += b"later"
    assert wire.written == b"HEAD[" + b"x" * length + b"]"


async def test_large_requests_and_large_answers_arrive_whole() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with served(echo) as url:
        client = JsonClient(url)
        for length in (0, 1, 1 << 16, (1 << 20) + 1, 1 << 23):
            body = b'"' + b"x" * length + b'"'
            assert (await client.post("/x", body)).body == "x" * length
        client.close()


@pytest.mark.parametrize("stage", ["not started", "connecting", "asked", "answering"])
async def test_a_cancelled_call_closes_its_connection_and_leaves_none_in_use(stage: str) -> None:
    asked, hung_up = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            await request(reader)
            asked.set()
            if stage == "answering":
                writer.write(PLAIN[:-1])
            await reader.read()
        hung_up.set()

    async with served(slow) as url:
        client = JsonClient(url)
        asking = asyncio.create_task(client.post("/x", {}))
        if stage != "not started":
            await asyncio.sleep(0)
        if stage in ("asked", "answering"):
            await asked.wait()
        if stage == "answering":
            while not any(link._held for link in client._busy):  # noqa: ASYNC110  a connection sends no notification
                await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not client._busy
        assert not client._idle
        if asked.is_set():
            await hung_up.wait()


async def test_tls_works_and_an_untrusted_certificate_is_refused(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await request(reader)
                writer.write(PLAIN)
        writer.transport.abort()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        client = JsonClient(f"https://localhost:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(ConnectionError, match="certificate"):
            await client.post("/x", {})
        assert client._tls is not None
        client._tls.load_verify_locations(certificate)
        for _ in range(3):
            assert (await client.post("/x", {})).body == [1, 2, 3]
        assert len(client._idle) == 1
        client.close()
