"""The HTTP client against responses of real servers and of broken ones."""

import asyncio
import errno
from typing import Any

import pytest

from agentgym.engines.sglang.http import Answer, JsonClient
from agentgym.errors import WireError
from tests.engines.sglang.peer import HangUp, Peer, giving


async def ask(answer: Any) -> Answer:
    """Return the client's reading of an answer."""
    async with Peer({"/x": giving(answer)}) as peer:
        client = JsonClient(peer.url)
        try:
            return await client.post("/x", {"a": [1, 2]})
        finally:
            client.close()


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        pytest.param({"b": 1}, 200, {"b": 1}, id="json"),
        pytest.param((400, {"error": "no"}), 400, {"error": "no"}, id="refused"),
        pytest.param((200, None), 200, None, id="empty"),
        pytest.param(b"HTTP/1.1 500 Oh no\r\nContent-Length: 4\r\n\r\noops", 500, "oops", id="no_json"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", 204, None, id="no_content"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n3;x=y\r\n,2]\r\n0\r\nTrailer: t\r\n\r\n",
            200,
            [1, 2],
            id="chunks",
        ),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nCONTENT-LENGTH:2\r\n\r\n{}", 200, {}, id="continue"
        ),
    ],
)
async def test_an_answer_is_parsed_into_status_and_body(sent: Any, status: int, body: Any) -> None:
    assert await ask(sent) == (status, body)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param(b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP/1", id="another_protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "an invalid length: '-5'", id="negative_length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "an invalid length: 'zz'", id="bad_chunk"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 18), "headers of the server's response exceed", id="endless_head"
        ),
    ],
)
async def test_invalid_http_is_a_wire_error(sent: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        await ask(sent)


async def test_a_connection_is_reused_and_each_request_in_flight_has_its_own() -> None:
    both = asyncio.Barrier(2)

    async def together(_: Any) -> Any:
        await both.wait()
        return {}

    async with Peer({"/one": giving({}), "/two": together}) as peer:
        client = JsonClient(peer.url)
        for _ in range(5):
            await client.post("/one", {})
        assert peer.connections == 1
        async with asyncio.TaskGroup() as asking:
            for _ in range(2):
                asking.create_task(client.post("/two", {}))
        assert peer.connections == 2
        client.close()


async def test_a_missing_server_or_a_closed_connection_is_a_connection_error() -> None:
    async def hang_up(_: Any) -> Any:
        raise HangUp

    async with Peer({"/x": hang_up}) as peer:
        client = JsonClient(peer.url)
        with pytest.raises(ConnectionError, match="/x"):
            await client.post("/x", {})
        await peer.die()
        with pytest.raises(ConnectionError, match="/x"):
            await client.post("/x", {})


async def test_an_answer_that_takes_too_long_is_a_connection_error() -> None:
    async def wait(_: Any) -> Any:
        await asyncio.Event().wait()

    async with Peer({"/x": wait}) as peer:
        client = JsonClient(peer.url)
        with pytest.raises(ConnectionError, match=r"no response within 0\.05 s"):
            await client.post("/x", {}, timeout_s=0.05)


async def test_a_connection_that_the_kernel_drops_is_a_connection_error_without_a_timeout() -> None:
    asked = asyncio.Event()

    async def wait(_: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with Peer({"/x": wait}) as peer:
        client = JsonClient(peer.url)
        asking = asyncio.create_task(client.post("/x", {}))
        await asked.wait()
        (link,) = client._busy
        link.connection_lost(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
        with pytest.raises(ConnectionError, match=r"/x: .*Connection timed out"):
            await asking
        client.close()


async def test_a_connection_that_the_server_closes_is_not_reused() -> None:
    async with Peer({"/x": giving(b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\n{}")}) as peer:
        client = JsonClient(peer.url)
        for _ in range(3):
            await client.post("/x", {})
        assert peer.connections == 3
        client.close()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "[" * 100_000 + "]" * 100_000),
        (b'{"a":"\xff"}', '{"a":"\ufffd"}'),
        (b'{"a":"\\ud800"}', {"a": "\ud800"}),
        (b'{"a":Infinity}', {"a": float("inf")}),
        (b"\n", None),
        (b"[1", "[1"),
    ],
    ids=["deep", "no_utf8", "half_a_character", "no_number", "blank", "cut"],
)
async def test_unusual_bodies_parse_the_same_with_and_without_orjson(
    body: bytes, value: Any, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = pytest.importorskip("orjson").loads
    monkeypatch.setattr("agentgym.engines.sglang.http._fast", loads if fast else None)
    assert await ask(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) == (200, value)


async def test_cancelling_a_request_or_closing_the_client_closes_the_connection() -> None:
    asked = asyncio.Event()

    async def wait(_: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with Peer({"/x": wait}) as peer:
        client = JsonClient(peer.url)
        asking = asyncio.create_task(client.post("/x", {}))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await peer.hung_up.wait()
        asked.clear()
        asking = asyncio.create_task(client.post("/x", {}))
        await asked.wait()
        client.close()
        with pytest.raises(ConnectionError):
            await asking


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url: "):
        JsonClient(url)
