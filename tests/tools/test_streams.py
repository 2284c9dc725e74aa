"""A tool that yields text: it is logged while the tool runs, and the model reads all of it as one result."""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

import agentgym as ag
from agentgym.testing import Scripted, call, calls, say
from agentgym.tools import DynamicTool, tools_of
from agentgym.tools.calls import dispatch
from tests.support.virtual_time import run_in_virtual_time

TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function in one that is not a generator function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Shop(ag.ToolEnv[ag.Task]):
    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.shown, self.closed = asyncio.Event(), 0

    @ag.tool
    async def build(self, parts: int) -> AsyncIterator[str]:
        """Build it, part by part."""
        for number in range(parts):
            yield f"part {number}\n"
            await self.shown.wait()
        yield "built"

    @ag.tool
    @plainly
    async def wrapped(self) -> AsyncIterator[str]:
        """Say two words."""
        yield "one "
        yield "two"

    @ag.tool(timeout_s=0.05)
    async def late(self) -> AsyncIterator[str]:
        """Start, and never end."""
        try:
            yield "begun"
            await asyncio.Event().wait()
        finally:
            self.closed += 1

    @ag.tool
    async def refuse(self) -> AsyncIterator[str]:
        """Start, and refuse."""
        yield "begun"
        raise ag.ToolError("no more parts")

    @ag.tool
    async def count(self) -> AsyncIterator[Any]:
        """Yield a number instead of text."""
        yield 1

    @ag.tool
    async def finish(self) -> AsyncIterator[str | ag.Stop]:
        """End the rollout."""
        try:
            yield "all "
            yield ag.Stop("finished", "done")
            yield "never"
        finally:
            self.closed += 1

    @ag.reward
    def right(self) -> float:
        return 1.0


async def test_each_piece_is_logged_as_it_arrives_and_the_model_reads_all_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "agentgym.tools")
    shop = Shop(TASK)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shop.shown.set()  # The tool waits for this, so its text is logged before it has ended.

    logger = logging.getLogger("agentgym.tools")
    logger.addHandler(handler := Handler())
    try:
        result = await dispatch(shop, "build", {"parts": 2})
    finally:
        logger.removeHandler(handler)
    assert result.content == "part 0\npart 1\nbuilt"
    assert caplog.messages == [f"tool 'build' of Shop, task t: {said}" for said in ("part 0", "part 1", "built")]


async def test_text_of_a_stream_cannot_forge_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def forge() -> AsyncIterator[str]:
        """Forge."""
        yield "a\nERROR b\x1b[2J"

    class Forger(Shop):
        async def extra_tools(self) -> list[DynamicTool]:
            return tools_of(forge)

    caplog.set_level(logging.INFO, "agentgym.tools")
    rollout = await ag.rollout(Forger, TASK, Scripted([call("forge"), say("done")]))
    assert rollout.segments[0].turns[0].env_messages[0]["content"] == "a\nERROR b\x1b[2J"
    assert caplog.messages == ["tool 'forge' of Forger, task t: a\\nERROR b\\x1b[2J"]


async def test_a_stream_inside_a_plain_decorator_is_also_read_as_one_result() -> None:
    assert (await dispatch(Shop(TASK), "wrapped", {})).content == "one two"


async def test_output_before_a_failure_is_read_after_the_error() -> None:
    shop = Shop(TASK)
    late, refused = await dispatch(shop, "late", {}), await dispatch(shop, "refuse", {})
    assert late.content == "error: tool 'late' timed out after 0.05 s\nOutput before the error:\nbegun"
    assert refused.content == "error: no more parts\nOutput before the error:\nbegun"
    assert (late.failed, refused.failed, shop.closed) == (True, False, 1)


def test_a_returned_stream_has_the_tools_remaining_time() -> None:
    class Slow(Shop):
        @ag.tool(timeout_s=10)
        async def soon(self) -> AsyncIterator[str]:
            """Return a stream, after a while."""
            await asyncio.sleep(4)
            return self.words()

        async def words(self) -> AsyncIterator[str]:
            yield "begun"
            await asyncio.sleep(1000)

    async def play() -> tuple[float, Any]:
        result = await dispatch(Slow(TASK), "soon", {})
        return asyncio.get_running_loop().time(), result.content

    seconds, content = run_in_virtual_time(play())
    assert seconds == pytest.approx(10)
    assert content == "error: tool 'soon' timed out after 10 s\nOutput before the error:\nbegun"


async def test_a_stream_may_only_yield_text() -> None:
    result = await dispatch(Shop(TASK), "count", {})
    assert (
        result.content
        == "error: tool 'count' failed: TypeError: the tool yielded 1; yield text, and ag.Stop only at the end"
    )


async def test_a_yielded_stop_ends_the_tool_and_the_rollout() -> None:
    rollout = await ag.rollout(Shop, TASK, Scripted([calls(("finish", {}), ("wrapped", {}))]))
    assert rollout.stop_reason == "finished"
    assert [message["content"] for message in rollout.segments[0].turns[0].env_messages] == ["all done"]


def endless(timeout_s: float = 30.0, **limits: Any) -> type[ag.ToolEnv[ag.Task]]:
    """Return an env whose tools yield endlessly, and await nothing."""

    class Endless(ag.ToolEnv[ag.Task]):
        @ag.tool(timeout_s=timeout_s)
        async def lines(self) -> AsyncIterator[str]:
            """Yield the lines of a file that has no end."""
            while True:
                spend()
                yield "y"

        @ag.tool(timeout_s=timeout_s)
        async def stubborn(self) -> AsyncIterator[str]:
            """Continue when it is closed for the first time."""
            closed = 0
            while True:
                try:
                    spend()
                    yield "y"
                except GeneratorExit:
                    closed += 1
                    if closed == 2:
                        raise

        @ag.tool(timeout_s=timeout_s)
        async def deaf(self) -> AsyncIterator[str]:
            """Continue when it is cancelled."""
            for _ in range(10_000):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.001)
                yield "y"

        @ag.tool(timeout_s=timeout_s)
        @plainly
        async def wrapped(self) -> AsyncIterator[str]:
            """Yield endlessly inside a decorator."""
            while True:
                spend()
                yield "y"

        @ag.reward
        async def right(self) -> float:
            return 1.0

    Endless.limits = ag.Limits(turns=4, context_tokens=10**9, **limits)
    return Endless


def spend() -> None:
    """Work for a millisecond, also by the clock of a loop in virtual time."""
    asyncio.get_running_loop().advance(0.001)  # type: ignore[attr-defined]
    until = time.perf_counter() + 0.001
    while time.perf_counter() < until:
        pass


@pytest.mark.parametrize("name", ["lines", "wrapped", "deaf"])
def test_a_stream_that_awaits_nothing_is_cut_at_its_limit_without_blocking_others(name: str) -> None:
    turns, ended = 0, False

    async def beside() -> None:
        nonlocal turns
        while not ended:
            turns += 1
            await asyncio.sleep(0.001)

    async def play() -> ag.Rollout:
        nonlocal ended
        other = asyncio.create_task(beside())
        played = await ag.rollout(endless(timeout_s=0.05), TASK, Scripted([call(name), say("done")]))
        ended = True
        await other
        return played

    played = run_in_virtual_time(play())
    assert f"tool '{name}' timed out after 0.05 s" in played.segments[0].turns[0].env_messages[0]["content"]
    assert turns > 1


def test_a_stream_that_ignores_being_closed_has_timed_out_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    script = Scripted([call("stubborn"), say("done")])
    played = run_in_virtual_time(ag.rollout(endless(timeout_s=0.05), TASK, script))
    said = played.segments[0].turns[0].env_messages[0]["content"]
    assert "tool 'stubborn' timed out after 0.05 s" in said
    assert "RuntimeError: async generator ignored GeneratorExit" in caplog.text
    assert played.reward == 1.0


@pytest.mark.parametrize("name", ["lines", "deaf", "stubborn"])
def test_the_rollouts_limit_applies_to_a_stream_that_awaits_nothing_or_ignores_being_cut(name: str) -> None:
    played = run_in_virtual_time(ag.rollout(endless(seconds=0.1), TASK, Scripted([call(name), say("done")])))
    assert played.stop_reason == "seconds"
