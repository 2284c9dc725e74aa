"""Cancelled rollouts are counted once, closed, and stopped."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling.accounting import LifecycleCounts
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.completion import Completion
from tests.scheduling.scheduled import Boxed, Held, Say, batch_stats, cut, ids, settle, task, tasks


class Stubborn(Say):
    """An env whose cancelled rollouts, except for task t0, end only when released."""

    let: asyncio.Event
    closing: set[str]

    async def close(self) -> None:
        if self.task.id != "t0":
            self.closing.add(self.task.id)
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                await self.let.wait()


def stubborn() -> type[Stubborn]:
    return type("Stubborn", (Stubborn,), {"let": asyncio.Event(), "closing": set()})


async def test_a_rollout_that_ends_while_it_is_being_cancelled_does_not_count() -> None:
    env, seen = stubborn(), list[str]()
    engine = Scripted([say("1")])
    async with Scheduler(
        env,
        tasks(),
        engine,
        Schedule(group_size=1, oversample=cut(extra_groups=1)),
        on_rollout=lambda done: seen.append(done.rollout_id),
    ) as scheduler:
        groups = await scheduler.collect(1)
        env.let.set()
        await settle()
        assert (ids(groups), seen, env.closing) == (["t0"], ["t0/0"], {"t1"})
        assert batch_stats(groups).rollouts == LifecycleCounts(started=2, finished=1, dropped=1)


async def test_a_task_is_not_drawn_again_while_its_cancelled_rollout_closes() -> None:
    env = stubborn()
    names = map(task, [0, 1, 1, 2, 3])
    async with Scheduler(
        env, names, Scripted([say("1")]), Schedule(group_size=1, oversample=cut(extra_groups=1))
    ) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t0"]
        second = asyncio.create_task(scheduler.collect(1))
        await settle()
        in_play = [group.task.id for group in scheduler._groups]
        env.let.set()
        assert in_play == ["t2", "t3"]  # t1 is still closing
        assert set(ids(await second)) < {"t2", "t3"}  # Whichever of the two ended first.


async def test_a_turn_of_a_dropped_rollout_is_not_sent_to_the_engine() -> None:
    asked: list[str] = []

    class Spy(Held):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            asked.append(session)
            return await super().generate(token_ids, session=session, **given)

    class Deaf(Say):
        """An env whose tool ignores its cancellation."""

        @ag.tool
        async def look(self) -> str:
            """Look until somebody cancels."""
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                async with self.fork("subagent", [ag.Message(role="user", content="?")]) as agent:
                    await agent.run()
            return "seen"

    class Mixed(Spy):
        def _next(self, token_ids: Sequence[int], session: str) -> Any:
            return call("look") if session.startswith("t0") else say("1")

    engine = Mixed(lambda name, turn: False)
    async with Scheduler(Deaf, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=1))) as scheduler:
        groups = await scheduler.collect(1)
        await settle()
    assert (ids(groups), asked) == (["t1"], ["t0/0/0", "t1/0/0"])
    assert batch_stats(groups).requests == LifecycleCounts(started=2, finished=2)


async def test_leaving_the_scheduler_cancels_all_running_rollouts(sandboxes: FakeSandboxPool) -> None:
    engine = Held(lambda name, turn: name == "t0/0")
    async with Scheduler(
        Boxed, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=1, carry=1)), sandboxes=sandboxes
    ) as scheduler:
        await scheduler.collect(1)
        assert len(sandboxes.leased) == 1
    assert (sandboxes.leased, engine.cancelled) == ([], {"t0/0"})


async def test_an_error_in_the_block_is_raised_unchanged() -> None:
    async def play() -> None:
        async with Scheduler(
            Say, tasks(), Held(lambda name, turn: name != "t0/0"), Schedule(group_size=1, max_staleness=1)
        ) as scheduler:
            await scheduler.collect(1)
            raise KeyError

    with pytest.raises(KeyError):
        await play()


async def test_an_error_in_a_callback_ends_everything_and_is_raised(sandboxes: FakeSandboxPool) -> None:
    def refuse(done: ag.Rollout) -> None:
        raise LookupError(done.rollout_id)

    engine = Held(lambda name, turn: name != "t1/0")
    with pytest.raises(ExceptionGroup) as raised:
        async with Scheduler(
            Boxed, tasks(), engine, Schedule(group_size=1), sandboxes=sandboxes, on_rollout=refuse
        ) as scheduler:
            await scheduler.collect(3)
    assert [repr(error) for error in raised.value.exceptions] == ["LookupError('t1/0')"]
    assert (sandboxes.leased, engine.cancelled) == ([], {"t0/0", "t2/0"})
