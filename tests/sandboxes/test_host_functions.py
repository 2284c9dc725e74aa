"""Host functions that code in a sandbox calls: they leak no error texts, and no call blocks the event loop."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentgym.errors import SandboxError, ToolError, tracebacks as failures
from agentgym.sandboxes.protocol import Sandbox
from agentgym.sandboxes.remote.host_functions import MAX_VALUES
from agentgym.sandboxes.remote.link import MAX_QUESTION, SERVER_ASKS
from agentgym.sandboxes.remote.wire import encode
from tests.sandboxes.test_asks import linked

SECRET = "https://shop/?key=s3cret"
OF_LOOP_S = 0.25
"""Far below the time of unbounded calls (0.6 s for 8 of 1 MB), far above that of one of the largest allowed calls."""


class Mute(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise ValueError(SECRET)


class MuteRefusal(ToolError):
    """A tool error whose text raises."""

    def __str__(self) -> str:
        raise ValueError(SECRET)


def raises(error: BaseException) -> Callable[..., Any]:
    def function() -> None:
        raise error

    return function


def later(error: BaseException) -> Callable[..., Any]:
    async def function() -> None:
        await asyncio.sleep(0)
        raise error

    return function


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError(SECRET)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
FAILURES: dict[str, tuple[Callable[..., Any], str]] = {
    "an error": (raises(KeyError(SECRET)), "the host function 'f' raised KeyError"),
    "an error of an async function": (later(OSError(SECRET)), "the host function 'f' raised OSError"),
    "an error whose text raises": (raises(Mute()), "the host function 'f' raised Mute"),
    "an async error whose text raises": (later(Mute()), "the host function 'f' raised Mute"),
    "a tool error": (raises(ToolError("no such article")), "no such article"),
    "a tool error whose text raises": (raises(MuteRefusal()), "MuteRefusal"),
    "a group of errors": (
        raises(ExceptionGroup(SECRET, [ValueError(SECRET)])),
        "the host function 'f' raised ExceptionGroup",
    ),
    "its own type error": (raises(TypeError(SECRET)), "the host function 'f' raised TypeError"),
    "its own cancellation": (later(asyncio.CancelledError(SECRET)), "the host function 'f' raised CancelledError"),
    "a cancellation in a plain function": (
        raises(asyncio.CancelledError(SECRET)),
        "the host function 'f' raised CancelledError",
    ),
    "an answer that is not JSON": (lambda: Unspeakable(), "the host function 'f' returned a value that is not JSON"),
    "an endless answer": (lambda: ENDLESS, "is not JSON"),
    "a missing argument": (lambda key: key, "f: missing a required argument: 'key'"),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", FAILURES)
async def test_code_is_told_only_the_type_of_an_error_but_the_text_of_a_tool_error(sandbox: Sandbox, what: str) -> None:
    function, told = FAILURES[what]
    result = await sandbox.python("try: f()\nexcept RuntimeError as e: print(e)", functions={"f": function})
    assert told in result.stdout
    assert "s3cret" not in result.stdout + result.stderr
    assert (await sandbox.python("1 + 1")).stdout == "2\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_text_of_a_host_functions_error_is_logged_once_on_the_host(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_said", set())
    caplog.set_level(logging.WARNING)
    code = "for _ in range(3):\n    try: lookup()\n    except RuntimeError: pass"
    await sandbox.python(code, functions={"lookup": raises(LookupError(SECRET))})
    (said,) = [record.getMessage() for record in caplog.records if "lookup" in record.getMessage()]
    assert said.startswith(f"the host function 'lookup' raised LookupError: {SECRET}, at test_host_functions.py:")


@asynccontextmanager
async def watched() -> AsyncIterator[list[float]]:
    """Yield a list to which each turn of the loop appends the processor time since the last one."""
    turns: list[float] = []
    going = True

    async def watch() -> None:
        last = time.thread_time()
        while going:
            await asyncio.sleep(0)
            turns.append((now := time.thread_time()) - last)
            last = now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        going = False
        await watching


def question(inside: str) -> bytes:
    return f'["f", [{inside}], {{}}]'.encode()


def filled(piece: str) -> str:
    return ",".join([piece] * ((MAX_QUESTION - 100) // (len(piece) + 1)))


QUESTIONS = {
    "lists": f"[{filled('[]')}]",
    "numbers": f"[{filled('1')}]",
    "dicts": "[" + filled('{"a":1}') + "]",
    "keys": "{" + ",".join(f'"{n}":{n}' for n in range(60_000)) + "}",
    "commas in a text": json.dumps("[{:,}]" * 150_000),
    "quotes in a text": json.dumps('"' * 500_000),
    "an unterminated string": '"' + '\\"' * 500_000,
    "digits": f"[{filled('9' * 4000)}]",
}


@pytest.mark.parametrize("what", QUESTIONS)
async def test_host_function_calls_sent_ahead_block_the_loop_one_by_one(what: str) -> None:
    asks = [encode({"id": 1, "ask": n}, question(QUESTIONS[what])) for n in range(1, 9)]
    link, theirs = await linked()
    answers: list[int] = []
    loop = asyncio.get_running_loop()
    theirs.setblocking(False)
    with theirs:
        calling = asyncio.create_task(link.call("python", b"", 600.0, {"f": lambda *args: answers.append(len(args))}))
        await loop.sock_recv(theirs, 1 << 20)
        async with watched() as turns:
            for ask in asks:
                await loop.sock_sendall(theirs, ask)
            await loop.sock_sendall(theirs, encode({"id": 1, "done": True}))
            assert (await calling).envelope["done"] is True
    assert max(turns) < OF_LOOP_S
    assert len(answers) == (8 if what in ("commas in a text", "quotes in a text", "digits") else 0)
    link.cut("the test is over")


async def test_the_loop_gets_a_turn_between_answers_to_calls_sent_ahead() -> None:
    link, theirs = await linked(*(encode({"id": 1, "ask": n}, question("")) for n in range(1, 9)), encode({"id": 1}))
    turns: list[int] = []
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1

    async def count() -> None:
        while asked < 8:
            turns.append(asked)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    with theirs:
        await link.call("python", b"", 600.0, {"f": ask})
    await counting
    assert set(range(1, 8)) <= set(turns)
    link.cut("the test is over")


async def test_a_server_that_calls_without_end_is_given_up_long_before_the_deadline() -> None:
    link, theirs = await linked()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    sent = 0

    async def keep_sending() -> None:
        nonlocal sent
        while True:
            sent += 1
            await loop.sock_sendall(theirs, encode({"id": 1, "ask": sent}, question("")))

    async def keep_reading() -> None:
        while await loop.sock_recv(theirs, 1 << 20):
            pass

    with theirs:
        working = [asyncio.create_task(each()) for each in (keep_sending, keep_reading)]
        with pytest.raises(SandboxError, match=f"host function call {SERVER_ASKS + 1} in one cell"):
            await link.call("python", b"", 1e6, {"f": lambda: 1})
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


async def test_a_call_that_our_server_would_never_forward_ends_the_sandbox() -> None:
    link, theirs = await linked()
    theirs.setblocking(False)
    large = encode({"id": 1, "ask": 1}, question(json.dumps("x" * MAX_QUESTION)))
    with theirs:
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(theirs, large))
        with pytest.raises(SandboxError, match=r"host function call 1 in one cell .*, with 104"):
            await link.call("python", b"", 600.0, {"f": lambda text: 1})
        await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_host_function_call_with_too_many_values_is_refused_in_the_code(sandbox: Sandbox) -> None:
    seen: list[int] = []
    code = f"f([0] * {MAX_VALUES // 2})\ntry: f([0] * {MAX_VALUES + 1})\nexcept RuntimeError as e: print(e)"
    result = await sandbox.python(code, functions={"f": lambda numbers: seen.append(len(numbers))}, timeout_s=60)
    assert result.stdout == f"more than {MAX_VALUES} values in the arguments of one call; pass them as one string\n"
    assert seen == [MAX_VALUES // 2]
