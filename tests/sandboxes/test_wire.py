"""Frames survive any cutting, and nothing malformed or too large passes."""

import asyncio
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from agentgym.errors import SandboxError, WireError
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.sandboxes.remote.wire import MAX_BODY, MAX_ENVELOPE, Decoder, Frame, Wire, encode


@given(
    st.lists(st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary()), max_size=5),
    st.integers(1, 50),
)
def test_frames_are_decoded_whole_however_they_were_cut(
    frames: list[tuple[dict[str, int | str], bytes]], step: int
) -> None:
    for envelope, _ in frames:
        envelope.pop("body", None)
    data = b"".join(encode(dict(envelope), body) for envelope, body in frames)
    decoder = Decoder()
    got = [frame for at in range(0, len(data), step) for frame in decoder.feed(data[at : at + step])]
    assert [frame.body for frame in got] == [body for _, body in frames]
    assert [{k: v for k, v in frame.envelope.items() if k != "body"} for frame in got] == [e for e, _ in frames]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_ENVELOPE + 1),
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 2) + b"{x",
        struct.pack(">I", 4) + b"\xff\xff\xff\xff",
        b"".join([struct.pack(">I", 13), b'{"body":-001}']),
        encode({"body": True}),
        encode({"body": MAX_BODY + 1}),
        encode({"body": "1"}),
    ],
)
def test_malformed_data_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        Decoder().feed(data)


def test_a_frame_over_the_limit_is_not_sent() -> None:
    with pytest.raises(WireError):
        encode({"x": "y" * MAX_ENVELOPE})
    with pytest.raises(WireError):
        encode({}, bytes(MAX_BODY + 1))


async def test_receiving_can_be_cancelled_without_losing_a_frame() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        wire = await Wire.over(ours)
        soon = asyncio.get_running_loop().time() + 10
        waiting = asyncio.create_task(wire.receive(soon))
        await asyncio.sleep(0)
        theirs.sendall(encode({"id": 1}))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await wire.receive(soon) == Frame({"id": 1}, b"")
        with pytest.raises(TimeoutError):
            await wire.receive(asyncio.get_running_loop().time())
        wire.close()
        with pytest.raises(WireError):
            await wire.receive(soon)
        with pytest.raises(WireError):
            wire.send({"id": 2})
        await asyncio.sleep(0)


async def test_each_wait_ends_at_its_own_deadline_whatever_the_previous_one() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        wire = await Wire.over(ours)
        clock = asyncio.get_running_loop().time
        for patience_s in (60.0, 0.05, 60.0):  # The second ends before the first would have; the third after it.
            until = clock() + patience_s
            theirs.send(encode({"id": 1}))
            assert await wire.receive(until) == Frame({"id": 1}, b"")
            waiting = asyncio.create_task(wire.receive(until))
            done, _ = await asyncio.wait({waiting}, timeout=0.3 if patience_s == 60.0 else 30.0)
            assert bool(done) == (patience_s == 0.05)
            theirs.send(encode({"id": 2}))
            if done:
                with pytest.raises(TimeoutError):
                    await waiting
                assert clock() >= until
                assert await wire.receive(clock() + 60.0) == Frame({"id": 2}, b"")
            else:
                assert await waiting == Frame({"id": 2}, b"")
        wire.close()


async def nothing() -> None:
    """Do nothing: this sandbox has nothing to end."""


async def answered(*frames: bytes) -> RemoteSandbox:
    """Return a sandbox whose server sends these frames, whatever the request."""
    ours, theirs = socket.socketpair()
    wire = await Wire.over(ours)
    with theirs:
        theirs.sendall(b"".join(frames))
    return await RemoteSandbox.open(wire, digest="fake", end=nothing)


HELLO = encode({"hello": 2, "python": "3"})
GOOD = {
    "id": 1,
    "status": "ok",
    "exit_code": 0,
    "state_lost": False,
    "truncated": False,
    "seconds": 0.1,
    "stdout": 1,
    "stderr": 0,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "fine"},
        {"status": 3},
        {"exit_code": "0"},
        {"stdout": 2},
        {"stdout": -1, "stderr": 2},
        {"truncated": 1},
        {"seconds": None},
        {"id": 2},
        {"id": "1"},
        {"stderr": None},
    ],
)
async def test_an_invalid_answer_breaks_the_sandbox(wrong: dict[str, object]) -> None:
    sandbox = await answered(HELLO, encode(GOOD | wrong, b"x"))
    with pytest.raises(SandboxError):
        await sandbox.python("1")
    assert sandbox.broken
    await sandbox.close()


async def test_a_valid_answer_is_a_result() -> None:
    sandbox = await answered(HELLO, encode(GOOD, b"x"))
    assert (await sandbox.python("1")).stdout == "x"
    with pytest.raises(SandboxError):
        await sandbox.python("1")
    await sandbox.close()


async def test_a_blocked_write_ends_with_a_sandbox_that_stops_responding() -> None:
    ours, theirs = socket.socketpair()
    with theirs:  # It stays open and reads nothing.
        theirs.sendall(HELLO)
        sandbox = await RemoteSandbox.open(await Wire.over(ours), digest="fake", end=nothing)
        writing = asyncio.create_task(sandbox.write({"a": bytes(8 << 20)}))
        await asyncio.sleep(0)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(SandboxError, match="the sandbox closed the connection"):
            await writing
        await sandbox.close()


async def test_a_server_of_another_protocol_is_refused() -> None:
    with pytest.raises(SandboxError, match="protocol"):
        await answered(encode({"hello": 99}))


@pytest.mark.parametrize(
    "names", [b"/etc/x", b"a/b", b"..", b"../", b".", b"./", b"/", b"", b"a//", b"good\0/x", b"good\0..", b"good\0"]
)
async def test_invalid_names_break_the_sandbox_and_nothing_is_written(names: bytes, tmp_path: Path) -> None:
    for call in ("list", "get"):
        sandbox = await answered(HELLO, encode({"id": 1}, names or b"\0"), encode({"id": 2}, b"content"))
        with pytest.raises(SandboxError, match="is not a name"):
            await (sandbox.list() if call == "list" else sandbox.get(".", tmp_path / "got"))
        assert sandbox.broken
        await sandbox.close()
    assert not (tmp_path / "got").exists()


@pytest.mark.parametrize(
    "answer", [{"error": "Directory not empty", "errno": 39}, {"error": "odd"}, {"clean": False, "why": "odd"}, {}]
)
async def test_a_reset_that_is_not_reported_clean_breaks_the_sandbox(answer: dict[str, object]) -> None:
    sandbox = await answered(HELLO, encode({"id": 1, **answer}))
    with pytest.raises(SandboxError, match="sandbox_lost"):
        await sandbox.reset()
    assert sandbox.broken
    await sandbox.close()


async def test_a_wire_reads_no_further_than_its_reader_and_then_continues() -> None:
    ours, theirs = socket.socketpair()
    wire, loop = await Wire.over(ours), asyncio.get_running_loop()
    theirs.setblocking(False)
    piece = encode({"n": 1}, bytes(64 << 10))
    with theirs:
        sending = asyncio.create_task(loop.sock_sendall(theirs, piece * 400))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not sending.done()
        assert len(wire._frames) < 64
        for _ in range(400):
            assert len((await wire.receive(loop.time() + 600)).body) == 64 << 10
        await sending
    wire.close()
