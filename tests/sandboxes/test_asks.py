"""Code that calls host functions too often: the host's other work continues, and no function is interrupted halfway."""

import asyncio
import socket
from typing import Any

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes.protocol import Sandbox
from agentgym.sandboxes.remote.link import MAX_OPEN_ASKS, Link
from agentgym.sandboxes.remote.wire import Frame, Wire, encode

RAW = """
import json, os, struct
def ask(number, size=0, call=None):
    head = json.dumps({"id": call, "ask": number, "body": size + 20}).encode()
    body = b'["f", [], {}]'.ljust(size + 20)
    data = struct.pack(">I", len(head)) + head + body
    while data:
        data = data[os.write(3, data):]
"""
"""Sends frames that only code with access to the worker's channel can send."""


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_from_a_cell_without_functions_never_reach_the_host(sandbox: Sandbox) -> None:
    heard: list[int] = []
    link = sandbox.link  # type: ignore[attr-defined]
    received = link._wire.data_received

    def data_received(data: bytes) -> None:
        heard.append(len(data))
        received(data)

    link._wire.data_received = data_received
    try:
        await sandbox.python("import gc, sys")
        code = RAW + "import sys\nhere = next(f for f in gc.get_objects() if type(f).__name__ == 'Worker').call\n"
        result = await sandbox.python(f"{code}for i in range(1, 1001): ask(i, 1 << 20, here)", timeout_s=30)
    finally:
        del link._wire.data_received
    assert result.status in ("ok", "protocol")
    assert sum(heard) < 4000
    assert (await sandbox.python("1 + 1")).stdout == "2\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_calling_a_function_of_an_earlier_cell_is_a_runtime_error(sandbox: Sandbox) -> None:
    await sandbox.python("kept = f", functions={"f": lambda: 1})
    result = await sandbox.python("try: kept()\nexcept RuntimeError as e: print(e)")
    assert result.stdout == "no host functions are available in this call\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_more_function_calls_at_once_than_can_wait_end_the_cell(sandbox: Sandbox) -> None:
    async def slow() -> None:
        await asyncio.Event().wait()

    await sandbox.python("import gc")
    code = RAW + "here = next(f for f in gc.get_objects() if type(f).__name__ == 'Worker').call\n"
    result = await sandbox.python(f"{code}for i in range(1, 100): ask(i, 0, here)", functions={"f": slow}, timeout_s=30)
    assert result.status == "protocol"
    assert (await sandbox.python("1 + 1")).stdout == "2\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_that_overtakes_another_does_not_cancel_it(sandbox: Sandbox) -> None:
    ended: list[int] = []
    asks, overtaken = list[int](), asyncio.Event()
    link = sandbox.link  # type: ignore[attr-defined]
    following = link._next

    async def noted(*args: Any) -> Frame:
        frame: Frame = await following(*args)
        asks.extend([frame.envelope["ask"]] if "ask" in frame.envelope else [])
        if len(asks) == 2:
            overtaken.set()
        return frame

    async def slow(number: int) -> int:
        try:
            await overtaken.wait()
        except asyncio.CancelledError:
            ended.append(-number)
            raise
        ended.append(number)
        return number

    code = """
import signal
class Bell(Exception): pass
def ring(_, frame):
    if frame.f_code.co_name == 'receive_some':  # The first call has been sent, and waits for its answer.
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Bell
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
try: slow(1)
except Bell: pass
slow(2)
"""
    link._next = noted
    try:
        result = await sandbox.python(code, functions={"slow": slow}, timeout_s=60)
    finally:
        del link._next
    assert result.stdout == "2\n"
    assert ended == [1, 2]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_after_the_time_limit_is_refused_and_the_state_is_kept(sandbox: Sandbox) -> None:
    begun = asyncio.Event()

    async def slow() -> None:
        begun.set()
        await asyncio.Event().wait()

    code = "x = 1\ntry: slow()\nexcept KeyboardInterrupt:\n    try: slow()\n    except RuntimeError as e: print(e)"
    while not begun.is_set():  # A loaded machine may reach the time limit before the first call.
        result = await sandbox.python(code, functions={"slow": slow}, timeout_s=0.3)
    assert (result.status, result.stdout) == ("timeout", "the time limit of this call has passed\n")
    assert not result.state_lost
    assert (await sandbox.python("x")).stdout == "1\n"


async def linked(*frames: bytes) -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(frames))
    return Link(await Wire.over(ours)), theirs


async def test_a_deadline_holds_even_if_frames_keep_arriving() -> None:
    link, theirs = await linked(*[encode({"id": 0}) for _ in range(5)])
    going = True

    async def keep_sending() -> None:
        while going:
            await asyncio.get_running_loop().sock_sendall(theirs, encode({"id": 1, "ask": 1}, b'["f", [], {}]'))
            await asyncio.sleep(0.001)  # more calls than a cell may make would end it too early

    theirs.setblocking(False)
    with theirs:
        sending = asyncio.create_task(keep_sending())
        with pytest.raises(SandboxError, match="in time"):
            await link.call("python", b"", 0.2, {"f": lambda: 1})
        going = False
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_an_answer_that_has_arrived_by_the_deadline_counts() -> None:
    asks = [encode({"id": 1, "ask": i + 1}, b'["f", [], {}]') for i in range(MAX_OPEN_ASKS)]
    link, theirs = await linked(*asks, encode({"id": 1, "done": True}))
    with theirs:
        frame = await link.call("python", b"", -1.0, {"f": lambda: 1})
    assert frame.envelope["done"] is True
    link.cut("the test is over")
    await asyncio.sleep(0)
