"""A failing asyncio.TaskGroup in an env's code is an error of that code, not a cancellation of the rollout."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, say
from agentgym.errors import EngineError, is_stray
from agentgym.scheduling import run_groups
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout
from tests.support.virtual_time import run_in_virtual_time

SCRIPT = [call("look"), say("done")]
TASKS = [ag.Task(id=name, prompt=(ag.Message(role="user", content="Go."),)) for name in ("bad", "good")]


async def raising(error: Exception) -> None:
    """Fail while the group that runs this is awaited."""
    await asyncio.sleep(0)
    raise error


async def failing() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raising(ValueError("boom")))


async def caught() -> None:
    try:
        await failing()
    except* ValueError:
        pass


def cancelling() -> int:
    """Return the number of pending cancellations of the running task."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


class Desk(ag.ToolEnv[ag.Task]):
    """An env each of whose methods calls `passes` for the task "bad"."""

    async def passes(self, where: str) -> None:
        """Run a test's code in this method."""

    async def _passes(self, where: str) -> None:
        if self.task.id == "bad":
            await self.passes(where)

    @ag.tool
    async def look(self) -> str:
        """Look around."""
        await self._passes("tool")
        return "nothing"

    async def setup(self) -> None:
        await self._passes("setup")

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await self._passes("reset")
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> Any:
        result = await super().step(action)
        await self._passes("step")
        return result

    @ag.reward
    async def graded(self) -> float:
        await self._passes("reward")
        return 1.0

    async def score(self) -> Any:
        await self._passes("score")
        return await super().score()

    async def close(self) -> None:
        await self._passes("close")


def desk(at: str, work: Callable[[], Awaitable[Any]]) -> type[Desk]:
    """Return a Desk that does this work in one of its methods."""

    async def passes(self: Desk, where: str) -> None:
        if where == at:
            await work()

    return type("Failing", (Desk,), {"passes": passes})


async def by_rollout(env: type[Desk], tasks: list[ag.Task]) -> list[Rollout]:
    return [await ag.rollout(env, task, Scripted(SCRIPT)) for task in tasks]


async def by_run_groups(env: type[Desk], tasks: list[ag.Task]) -> list[Rollout]:
    return list((await run_groups(env, tasks, Scripted(SCRIPT), n=1)).rollouts)


async def by_scheduler(env: type[Desk], tasks: list[ag.Task]) -> list[Rollout]:
    async with Scheduler(env, tasks, Scripted(SCRIPT), Schedule(group_size=1)) as scheduler:
        return list((await scheduler.collect(len(tasks))).rollouts)


async def by_evaluate(env: type[Desk], tasks: list[ag.Task]) -> list[Rollout]:
    return list((await ag.evaluate(env, Scripted(SCRIPT), tasks=tasks)).rollouts)


PLAYERS = [by_rollout, by_run_groups, by_scheduler, by_evaluate]
METHODS = ["setup", "reset", "tool", "step", "reward", "score", "close"]


@pytest.mark.parametrize("play", PLAYERS)
@pytest.mark.parametrize("at", METHODS)
async def test_a_failing_task_group_is_an_error_of_its_method_only(at: str, play: Any) -> None:
    bad, good = await play(desk(at, failing), TASKS)
    assert good.reward == 1.0
    if at == "tool":
        assert (bad.reward, bad.metrics["tool_errors"]) == (1.0, 1)
    else:
        where = {"reward": "Failing: reward 'graded' raised", "setup": "Failing.setup:"}.get(at, f"Failing.{at}:")
        assert (bad.error or "").startswith(f"EnvError: {where} ValueError: boom, at test_failing_task_groups.py:")
    assert cancelling() == 0


@pytest.mark.parametrize("at", METHODS)
async def test_a_failing_task_group_that_the_env_catches_changes_nothing(at: str) -> None:
    (rollout,) = await by_rollout(desk(at, caught), TASKS[:1])
    assert (rollout.reward, rollout.error, rollout.metrics.get("tool_errors", 0)) == (1.0, None, 0)


@pytest.mark.parametrize("work", [failing, caught])
async def test_a_failing_task_group_in_a_group_reward_is_that_rewards_error(
    work: Callable[[], Awaitable[None]],
) -> None:
    class Ranked(Desk):
        @classmethod
        async def group_reward(cls, task: Any, rollouts: Any, models: Any) -> list[float]:
            if task.id == "bad":
                await work()
            return [0.5] * len(rollouts)

    for play in PLAYERS[1:]:
        bad, good = await play(Ranked, TASKS)
        assert good.reward == 1.5
        said = "EnvError: Ranked.group_reward: ValueError: boom, at " if work is failing else ""
        assert (bad.error or "").startswith(said)
        assert bad.reward == (None if said else 1.5)


async def test_an_engine_failure_in_a_rewards_task_group_is_an_engine_error() -> None:
    async def broken() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raising(EngineError("gone")))

    (rollout,) = await by_rollout(desk("reward", broken), TASKS[:1])
    assert rollout.error == "EngineError: gone"


async def test_a_failing_sub_agent_in_a_task_group_is_a_result_that_the_model_reads() -> None:
    class Splits(Desk):
        @ag.tool
        async def look(self) -> str:
            """Ask two sub-agents, one of whom is none."""
            async with asyncio.TaskGroup() as both:
                both.create_task(self.ask())
                both.create_task(raising(ValueError("boom")))
            return "both"

        async def ask(self) -> None:
            async with self.fork("subagent", [Message(role="user", content="SUB")]) as agent:
                await agent.run()

    class Silent(Scripted):
        """An engine that never answers a sub-agent."""

        async def generate(self, token_ids: Any, **given: Any) -> Any:
            if "SUB" in ByteTokenizer().decode(token_ids):
                await asyncio.Event().wait()
            return await super().generate(token_ids, **given)

    rollout = await ag.rollout(Splits, TASKS[0], Silent(SCRIPT))
    assert (rollout.reward, rollout.stop_reason) == (1.0, "answer")
    (answer,) = rollout.segments[0].turns[0].env_messages
    assert "failed: ValueError: boom" in answer["content"]


# Real cancellations and limits after a failing group


async def for_ever() -> None:
    await asyncio.Event().wait()


def then(*work: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
    async def one_after_the_other() -> None:
        for do in work:
            await do()

    return one_after_the_other


@pytest.mark.parametrize("at", METHODS)
async def test_a_cancellation_after_a_failing_task_group_ends_the_rollout(at: str) -> None:
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await for_ever()

    playing = asyncio.create_task(ag.rollout(desk(at, then(caught, hang)), TASKS[0], Scripted(SCRIPT)))
    await reached.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert playing.cancelling() == 1


@pytest.mark.parametrize("at", ["reset", "tool", "step", "reward"])
async def test_a_cancellation_while_a_failing_task_group_is_awaited_ends_the_rollout(at: str) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await for_ever()
        finally:
            reached.set()
            await go_on.wait()

    async def group_that_ends_slowly() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(slow_to_end())
            group.create_task(raising(ValueError("boom")))

    playing = asyncio.create_task(ag.rollout(desk(at, group_that_ends_slowly), TASKS[0], Scripted(SCRIPT)))
    await reached.wait()
    playing.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_a_cancellation_that_a_tool_swallows_after_a_failing_group_ends_the_rollout() -> None:
    reached = asyncio.Event()

    async def swallow() -> None:
        reached.set()
        with suppress(BaseException):
            await for_ever()

    env = desk("tool", then(caught, swallow, caught))
    playing = asyncio.create_task(ag.rollout(env, TASKS[0], Scripted(lambda text: call("look"))))
    await reached.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


def test_the_limit_of_a_rollout_holds_after_a_failing_task_group() -> None:
    env: Any = desk("tool", then(caught, for_ever))
    env = type("Limited", (env,), {"limits": ag.Limits(seconds=10)})
    rollout = run_in_virtual_time(ag.rollout(env, TASKS[0], Scripted(SCRIPT)))
    assert (rollout.stop_reason, rollout.reward) == ("seconds", 1.0)


def test_the_limits_of_a_tool_and_of_the_user_hold_after_a_failing_task_group() -> None:
    class Limited(Desk):
        @ag.tool(timeout_s=10)
        async def look(self) -> str:
            """Try for a second, then for ever."""
            await caught()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await for_ever()
            await for_ever()
            return ""

    rollout = run_in_virtual_time(ag.rollout(Limited, TASKS[0], Scripted(SCRIPT)))
    assert (rollout.stop_reason, rollout.reward) == ("answer", 1.0)
    (answer,) = rollout.segments[0].turns[0].env_messages
    assert "timed out after 10 s" in answer["content"]


# The count of cancellations


async def test_a_cancelled_error_without_a_cancellation_is_stray_after_a_failing_group() -> None:
    await caught()
    assert is_stray(asyncio.CancelledError())


async def test_a_failing_task_group_leaves_the_cancellation_count_unchanged() -> None:
    async def nested() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(raising(ValueError("outer")))
            inner.create_task(raising(ValueError("inner")))

    async def failing_in_the_block() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raising(ValueError("child")))
            await for_ever()

    for work in (failing, nested, failing_in_the_block):
        with pytest.raises(ExceptionGroup):
            await work()
        assert cancelling() == 0
        await asyncio.sleep(0)  # Nothing is left to be raised at the next await.


async def healthy() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))


@pytest.mark.parametrize("work", [caught, healthy])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_task_group_reverts_no_other_cancellation(times: int, work: Callable[[], Awaitable[None]]) -> None:
    left: list[int] = []

    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        for _ in range(times):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        await work()
        left.append(task.cancelling())

    with suppress(asyncio.CancelledError):  # From Python 3.13 on, the group raises it once more.
        await asyncio.create_task(cancelled())
    assert left == [times]


async def test_a_user_defined_task_group_leaves_the_cancellation_count_unchanged() -> None:
    class Named(asyncio.TaskGroup):
        async def __aexit__(self, *error: Any) -> None:
            return await super().__aexit__(*error)

    with pytest.raises(ExceptionGroup):
        async with Named() as group:
            group.create_task(raising(ValueError("boom")))
    assert cancelling() == 0


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="groups give their cancellation back themselves")
async def test_a_task_group_patched_by_others_reverts_only_its_own_cancellation() -> None:
    class Mended(asyncio.TaskGroup):
        async def __aexit__(self, *error: Any) -> None:
            group: Any = self
            given_back = group._parent_cancel_requested
            try:
                return await super().__aexit__(*error)
            finally:
                if group._parent_cancel_requested and not given_back:
                    group._parent_task.uncancel()

    async def cancelled() -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        with pytest.raises(ExceptionGroup):
            async with Mended() as group:
                group.create_task(raising(ValueError("boom")))
        return cancelling()

    assert await asyncio.create_task(cancelled()) == 1
