"""Blocking work: the event loop keeps running, and work whose caller has gone is interrupted."""

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from decimal import Decimal, getcontext
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.machine.time_limits import TimeLimit, off_the_clock
from agentgym.scheduling import run_groups
from agentgym.tools import tool_threads as threads
from agentgym.tools.calls import dispatch
from agentgym.tools.tool import tool
from agentgym.tools.tool_threads import in_own_thread


async def ended(thread: threading.Thread) -> None:
    await asyncio.to_thread(thread.join)


class Busy:
    """Computes forever, in a plain Python loop."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.steps = 0

    @tool(timeout_s=0.2)
    def spin(self) -> str:
        """Never come back."""
        self.thread = threading.current_thread()
        while True:
            self.steps += 1

    @tool(timeout_s=0.2)
    def stubborn(self) -> str:
        """Catch everything that is an Exception."""
        self.thread = threading.current_thread()
        while True:
            try:
                self.steps += 1
            except Exception:
                self.steps = 0


@pytest.mark.parametrize("name", ["spin", "stubborn"])
async def test_a_tool_that_computes_forever_ends_at_its_limit_without_blocking_the_loop(
    name: str, no_leaks: None
) -> None:
    busy, beats = Busy(), 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    beating = asyncio.create_task(beat())
    while busy.thread is None:  # A call does nothing if its thread had not started by its time limit.
        result = await dispatch(busy, name, {})
        assert (result.error, result.content) == (True, f"error: tool {name!r} timed out after 0.2 s")
    beating.cancel()
    assert beats > 0
    await ended(busy.thread)


async def test_a_cancelled_caller_ends_the_work(no_leaks: None) -> None:
    busy, begun, loop = Busy(), asyncio.Event(), asyncio.get_running_loop()
    found: list[threading.Thread] = []

    def spin() -> None:
        found.append(threading.current_thread())
        loop.call_soon_threadsafe(begun.set)
        busy.spin()

    working = asyncio.create_task(in_own_thread(spin))
    await begun.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await ended(found[0])


async def test_work_whose_caller_has_gone_is_not_started() -> None:
    begun: list[str] = []
    worker = threads._Worker(lambda: begun.append("work"), asyncio.get_running_loop(), "t")
    worker.interrupt()
    worker.thread.start()
    await ended(worker.thread)
    with pytest.raises(threads.Interrupted):
        await worker.future
    assert begun == []


async def test_finished_work_is_not_interrupted_while_its_thread_reports_it() -> None:
    loop, returned, go_on = asyncio.get_running_loop(), threading.Event(), threading.Event()

    class Slow:
        """A loop that is slow to receive a result."""

        def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
            returned.set()
            go_on.wait()
            loop.call_soon_threadsafe(callback)

        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

    told: list[BaseException | None] = []

    class Watched(threads._Worker):
        def _tell(self, set_it: Callable[[Any], None], value: object) -> None:
            try:
                super()._tell(set_it, value)
                told.append(None)
            except BaseException as error:
                told.append(error)

    worker = Watched(lambda: 7, Slow(), "t")  # type: ignore[arg-type]
    worker.thread.start()
    await asyncio.to_thread(returned.wait)
    worker.interrupt()
    go_on.set()
    await ended(worker.thread)
    assert told == [None]
    assert await worker.future == 7


async def test_work_that_ends_while_its_thread_starts_has_its_result_at_once() -> None:
    class Ended(threading.Thread):
        def start(self) -> None:
            super().start()
            self.join()

    def fail() -> None:
        raise KeyError("x")

    returns, raises = (threads._Worker(work, asyncio.get_running_loop(), "t") for work in (lambda: 7, fail))
    for worker in (returns, raises):
        worker.thread = Ended(target=worker._run)
        worker.start()
    assert returns.future.done()
    assert returns.future.result() == 7
    assert isinstance(raises.future.exception(), KeyError)


async def test_work_that_outlasts_its_threads_start_reports_to_the_loop() -> None:
    go_on = threading.Event()
    worker = threads._Worker(go_on.wait, asyncio.get_running_loop(), "t")
    worker.start()
    assert not worker.future.done()
    go_on.set()
    assert await worker.future is True


async def test_a_calls_thread_has_ended_when_the_call_returns() -> None:
    for _ in range(300):
        await in_own_thread(lambda: None, name="of this test")
        assert "of this test" not in {thread.name for thread in threading.enumerate()}


async def test_work_that_catches_its_interrupt_is_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRACE_S", 0.01)
    begun, loop = asyncio.Event(), asyncio.get_running_loop()
    found: list[threading.Thread] = []

    def spin() -> None:
        found.append(threading.current_thread())
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                pass
        except BaseException:
            while True:
                pass

    working = asyncio.create_task(in_own_thread(spin))
    await begun.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await ended(found[0])


async def test_a_thread_that_cannot_be_ended_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "GRACE_S", 0.0)
    release, inside, said = threading.Event(), asyncio.Event(), asyncio.Event()
    lines: list[str] = []

    def warn(line: str, *parts: str) -> None:
        lines.append(line % parts)
        said.set()

    monkeypatch.setattr(threads.log, "warning", warn)
    loop, found = asyncio.get_running_loop(), []

    def wait() -> None:
        found.append(threading.current_thread())
        loop.call_soon_threadsafe(inside.set)
        with suppress(threads.Interrupted):
            release.wait()  # one C call
        release.wait()  # the interrupt may have come before that call

    working = asyncio.create_task(in_own_thread(wait))
    await inside.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await said.wait()
    assert "keeps running after it was interrupted" in lines[0]
    assert re.search(r"its thread 'agentgym-tool' was still running, at test_tool_threads\.py:\d+ in wait$", lines[0])
    release.set()
    await ended(found[0])


async def test_exceptions_of_the_work_reach_its_caller() -> None:
    def fail(error: BaseException) -> Any:
        raise error

    with pytest.raises(KeyError):
        await in_own_thread(lambda: fail(KeyError("x")))
    with pytest.raises(RuntimeError, match="StopIteration: end"):
        await in_own_thread(lambda: fail(StopIteration("end")))


async def test_a_tool_that_awaits_nothing_is_called_without_a_timer() -> None:
    class Quick:
        @tool
        async def now(self) -> str:
            """Answer at once."""
            return "now"

    loop = asyncio.get_running_loop()
    asked: list[float] = []
    loop.call_at = lambda when, *rest, **more: asked.append(when)  # type: ignore[assignment, method-assign]
    assert (await dispatch(Quick(), "now", {})).content == "now"
    assert asked == []


async def test_a_waiting_tool_is_held_to_its_limit_and_may_use_timeouts_itself() -> None:
    class Slow:
        @tool(timeout_s=0.05)
        async def never(self) -> None:
            """Wait for ever."""
            await asyncio.Event().wait()

        @tool(timeout_s=30)
        async def own(self) -> str:
            """Wait for a little while."""
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()
            except TimeoutError:
                return "its own"
            raise AssertionError

        @tool(timeout_s=30)
        async def raises(self) -> None:
            """Raise what a limit raises."""
            await asyncio.sleep(0)
            raise TimeoutError("theirs")

        @tool(timeout_s=30)
        async def several(self) -> list[int]:
            """Wait more than once."""
            return [await asyncio.sleep(0, n) for n in range(3)]

    slow = Slow()
    assert (await dispatch(slow, "never", {})).content == "error: tool 'never' timed out after 0.05 s"
    assert (await dispatch(slow, "own", {})).content == "its own"
    assert (await dispatch(slow, "raises", {})).content == "error: tool 'raises' failed: TimeoutError: theirs"
    assert (await dispatch(slow, "several", {})).content == "[0, 1, 2]"


named: ContextVar[str] = ContextVar("named", default="nobody")


class Traced(ag.ToolEnv[ag.Task]):
    async def setup(self) -> None:
        named.set(self.task.id)
        getcontext().prec = 3

    @ag.tool
    def plain(self) -> str:
        """Say the name and a third, and name something else."""
        said = f"{named.get()} {Decimal(1) / 3}"
        named.set("the thread")
        return said

    @ag.reward
    def right(self) -> float:
        return float(named.get() == self.task.id)


async def test_plain_tools_and_rewards_see_a_copy_of_their_rollouts_context_variables() -> None:
    tasks = [ag.Task(id=name, prompt="Go.") for name in ("a", "b")]
    groups = await run_groups(Traced, tasks, Scripted([call("plain"), say("done")]), n=2)
    said = {r.group_id: r.segments[0].turns[0].env_messages[0]["content"] for r in groups.rollouts}
    assert said == {"a": "a 0.333", "b": "b 0.333"}
    assert [r.reward for r in groups.rollouts] == [1.0] * 4
    assert named.get() == "nobody"


async def test_an_event_loop_in_a_thread_pauses_no_limit_of_the_rollouts_loop() -> None:
    async def paused() -> None:
        with off_the_clock():
            await asyncio.sleep(0)

    async def held() -> None:
        await asyncio.sleep(0)
        await in_own_thread(lambda: asyncio.run(stopped(limit)))
        await asyncio.Event().wait()

    async def stopped(outer: TimeLimit) -> None:
        with off_the_clock():
            assert not outer._pauses
        await TimeLimit(5).bound(paused())

    limit = TimeLimit(0.2)
    with pytest.raises(TimeoutError):
        await limit.bound(held())
