"""Calls of one turn that are declared parallel run concurrently, with the same outcome as if they had run in order."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

import agentgym as ag
from agentgym.errors import SandboxError
from agentgym.testing import Scripted, call, calls, raw, say
from tests.support.virtual_time import run_in_virtual_time

TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})


class Desk(ag.ToolEnv[ag.Task]):
    """Its tools record when they start and end; `open` opens a door at which others wait."""

    limits = ag.Limits(turns=4, seconds=60)

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.noted: list[str] = []
        self.doors: dict[str, asyncio.Event] = {}
        self.both = threading.Barrier(2)
        last.append(self)

    def door(self, name: str) -> asyncio.Event:
        return self.doors.setdefault(name, asyncio.Event())

    @ag.tool(parallel=True, timeout_s=30)
    async def wait(self, door: str, opens: str = "") -> str:
        """Wait at a door, and open another one before."""
        self.noted.append(f"wait {door}")
        self.door(opens).set()
        if opens == "both":
            both_wait[0].set()
        try:
            await self.door(door).wait()
        except asyncio.CancelledError:
            self.noted.append(f"cancelled {door}")
            raise
        self.noted.append(f"through {door}")
        return f"through {door}"

    @ag.tool(parallel=True, timeout_s=30)
    async def open(self, door: str) -> str:
        """Open a door."""
        self.noted.append(f"open {door}")
        self.door(door).set()
        return f"opened {door}"

    @ag.tool(parallel=True, timeout_s=5)
    async def late(self) -> str:
        """Wait forever."""
        await asyncio.Event().wait()
        return "never"

    @ag.tool(parallel=True)
    def meet(self) -> str:
        """Meet another thread."""
        return f"met {self.both.wait(timeout=60) in (0, 1)}"

    @ag.tool(parallel=True)
    def spin(self) -> str:
        """Run forever."""
        while True:
            time.sleep(0.001)

    @ag.tool(parallel=True)
    async def leave(self) -> ag.Stop:
        """Go."""
        return ag.Stop("left", "bye")

    @ag.tool(parallel=True)
    async def unplug(self) -> str:
        """Lose the sandbox."""
        raise SandboxError("the sandbox died")

    @ag.tool(parallel=True)
    async def explode(self) -> str:
        """Fail."""
        raise KeyError("fuse")

    @ag.tool
    async def alone(self) -> str:
        """Run alone."""
        self.noted.append("alone")
        return "alone"

    @ag.reward
    def right(self) -> float:
        return 1.0


last: list[Desk] = []
both_wait = [asyncio.Event()]
"""Set when a call reports that it and the one before it are waiting."""


@pytest.fixture(autouse=True)
def _no_desk_yet() -> None:
    last.clear()
    both_wait[0] = asyncio.Event()


async def played(*script: Any) -> ag.Rollout:
    return await ag.rollout(Desk, TASK, Scripted([*script, say("done")]))


async def timed(work: Coroutine[Any, Any, ag.Rollout]) -> tuple[float, ag.Rollout]:
    """Return the work's duration by the event loop's clock, in seconds, and its result."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    rollout = await work
    return loop.time() - begun, rollout


def told(rollout: ag.Rollout) -> list[str]:
    """Return the texts of the tool messages after the first turn."""
    return [message["content"] for message in rollout.segments[0].turns[0].env_messages]


async def test_parallel_calls_can_wait_for_each_other_and_results_are_in_call_order(
    no_leaks: None,
) -> None:
    first, second = ("wait", {"door": "b", "opens": "a"}), ("wait", {"door": "a", "opens": "b"})
    rollout = await played(calls(first, second))
    assert told(rollout) == ["through b", "through a"]
    assert last[0].noted[:2] == ["wait b", "wait a"]
    assert (rollout.reward, rollout.metrics["tool_calls"]) == (1.0, 2)


async def test_results_are_in_call_order_even_if_the_first_call_ends_last(no_leaks: None) -> None:
    rollout = await played(calls(("wait", {"door": "a"}), ("open", {"door": "a"})))
    assert told(rollout) == ["through a", "opened a"]
    messages = rollout.segments[0].turns[0].env_messages
    ids = [made["id"] for made in rollout.messages[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages] == ids


async def test_concurrent_plain_tools_have_separate_threads(no_leaks: None) -> None:
    assert told(await played(calls(("meet", {}), ("meet", {})))) == ["met True", "met True"]


async def test_a_call_that_is_not_parallel_runs_after_earlier_and_before_later_calls(
    no_leaks: None,
) -> None:
    before = [("wait", {"door": "a"}), ("open", {"door": "a"})]
    rollout = await played(calls(*before, ("alone", {}), ("open", {"door": "b"}), ("wait", {"door": "b"})))
    assert last[0].noted == ["wait a", "open a", "through a", "alone", "open b", "wait b", "through b"]
    assert told(rollout) == ["through a", "opened a", "alone", "opened b", "through b"]


async def test_calls_after_a_stop_are_cancelled_and_calls_before_it_finish(no_leaks: None) -> None:
    before = [("wait", {"door": "a"}), ("open", {"door": "a"})]
    rollout = await ag.rollout(
        Desk, TASK, Scripted([calls(*before, ("leave", {}), ("wait", {"door": "never"}), ("explode", {}))])
    )
    assert (rollout.stop_reason, told(rollout)) == ("left", ["through a", "opened a", "bye"])
    assert "cancelled never" in last[0].noted
    assert (rollout.metrics["tool_calls"], rollout.metrics["tool_errors"]) == (3, 0)
    assert not last[0].tool_failures


async def test_the_first_of_two_stops_in_call_order_ends_the_rollout() -> None:
    rollout = await ag.rollout(Desk, TASK, Scripted([calls(("leave", {}), ("unplug", {}))]))
    assert (rollout.stop_reason, rollout.error) == ("left", None)


async def test_a_dead_sandbox_fails_the_rollout_after_the_earlier_calls_have_ended(no_leaks: None) -> None:
    before = [("wait", {"door": "a"}), ("open", {"door": "a"})]
    rollout = await played(calls(*before, ("unplug", {}), ("wait", {"door": "never"})))
    assert rollout.error == "SandboxError: the sandbox died"
    assert last[0].noted == ["wait a", "open a", "wait never", "through a", "cancelled never"]
    assert rollout.metrics["tool_calls"] == 2


def test_each_call_has_a_separate_time_limit_and_failure() -> None:
    script = calls(("late", {}), ("explode", {}), ("wait", {"door": "a"}), ("open", {"door": "a"}))
    seconds, rollout = run_in_virtual_time(timed(played(script)))
    assert seconds == pytest.approx(5)
    assert told(rollout) == [
        "error: tool 'late' timed out after 5 s",
        "error: tool 'explode' failed: KeyError: 'fuse'",
        "through a",
        "opened a",
    ]
    assert last[0].tool_failures == {"late": 1, "explode": 1}
    counted = ("tool_calls", "tool_errors", "tool_errors/late", "tool_errors/explode", "malformed_calls")
    assert [rollout.metrics[name] for name in counted] == [4, 2, 1, 1, 0]


async def test_a_malformed_call_among_parallel_ones_gets_its_message_in_order() -> None:
    unknown = [("open", {"door": "a"}), ("shut", {}), ("open", {"gate": "b"}), ("wait", {"door": "a"})]
    rollout = await played(calls(*unknown))
    assert [text.partition(":")[0] for text in told(rollout)] == ["opened a", "error", "error", "through a"]
    assert [rollout.metrics[name] for name in ("tool_calls", "malformed_calls")] == [2, 2]
    assert (await played(raw("<tool_call>{oops</tool_call>"))).metrics["malformed_calls"] == 1


async def test_a_cancelled_rollout_ends_all_of_its_calls(no_leaks: None) -> None:
    script = calls(("wait", {"door": "a"}), ("wait", {"door": "b", "opens": "both"}), ("spin", {}))
    running = asyncio.create_task(played(script))
    await both_wait[0].wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(last[0].noted[-2:]) == ["cancelled a", "cancelled b"]


def test_the_rollouts_limit_ends_all_of_its_calls() -> None:
    class Short(Desk):
        limits = ag.Limits(seconds=20)

    script = Scripted([calls(("wait", {"door": "a"}), ("wait", {"door": "b"}))])
    seconds, rollout = run_in_virtual_time(timed(ag.rollout(Short, TASK, script)))
    assert seconds == pytest.approx(20)
    assert (rollout.stop_reason, rollout.reward) == ("seconds", 1.0)
    assert last[0].noted == ["wait a", "wait b", "cancelled a", "cancelled b"]


async def test_sub_agents_also_run_their_calls_in_parallel() -> None:
    class Chief(Desk):
        @ag.tool
        async def ask(self) -> str:
            """Ask a sub-agent."""
            async with self.fork("subagent", [{"role": "user", "content": "?"}], tools=[self.wait, "open"]) as agent:
                return await agent.run()

    at_once = calls(("wait", {"door": "a"}), ("open", {"door": "a"}))
    rollout = await ag.rollout(Chief, TASK, Scripted([call("ask"), at_once, say("both"), say("done")]))
    assert [message["content"] for message in rollout.segments[1].turns[0].env_messages] == ["through a", "opened a"]


async def test_a_second_cancellation_still_waits_for_slow_cleanup() -> None:
    from agentgym.tools.at_once import started

    begun, ending, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def slow() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ending.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("slow")
                raise

    async def both() -> None:
        async with started([slow(), slow()], most=2) as results:
            for coming in results:
                await coming

    running = asyncio.create_task(both())
    await begun.wait()
    running.cancel()
    await ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["slow", "slow"]


class Capped(ag.ToolEnv[ag.Task]):
    """Its tool records how many of its calls are running, and yields to the others while it waits."""

    limits = ag.Limits(parallel_calls=2)

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.running = self.most = 0
        self.begun: list[int] = []
        capped.append(self)

    @ag.tool(parallel=True)
    async def fetch(self, number: int) -> "str | ag.Stop":
        """Fetch a page."""
        self.begun.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(20):
            await asyncio.sleep(0)
        self.running -= 1
        return ag.Stop("enough") if number == 9 else f"page {number}"

    @ag.reward
    def one(self) -> float:
        return 1.0


capped: list[Capped] = []


async def test_calls_are_limited_in_number_and_start_in_order(no_leaks: None) -> None:
    turn = calls(*(("fetch", {"number": number}) for number in range(7)))
    rollout = await ag.rollout(Capped, TASK, Scripted([turn, say("done")]))
    assert told(rollout) == [f"page {number}" for number in range(7)]
    assert (capped[-1].most, capped[-1].begun) == (2, list(range(7)))
    assert ag.Limits().parallel_calls == 16


async def test_a_waiting_call_after_one_that_stops_the_rollout_never_starts(no_leaks: None) -> None:
    turn = calls(*(("fetch", {"number": number}) for number in (0, 9, 2, 3, 4, 5)))
    rollout = await ag.rollout(Capped, TASK, Scripted([turn]))
    assert (rollout.stop_reason, rollout.metrics["tool_calls"]) == ("enough", 2)
    assert 5 not in capped[-1].begun


@pytest.mark.parametrize("given", [1, "yes", None])
def test_parallel_must_be_a_boolean(given: Any) -> None:
    with pytest.raises(ValueError, match="parallel: must be True or False"):
        ag.tool(parallel=given)
