"""Rollouts that are carried over into later batches, and the bound on their age."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling.accounting import Groups, LifecycleCounts
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.completion import Completion
from tests.scheduling.scheduled import Boxed, Held, Say, batch_stats, cut, ids, settle, tasks
from tests.support.virtual_time import run_in_virtual_time


async def test_a_cut_rollout_resumes_with_its_sandbox_and_segment_under_the_next_policy(
    sandboxes: FakeSandboxPool,
) -> None:
    engine = Held(lambda name, turn: name == "t0/1" and turn == 1, call("look"), call("look"), say("1"))
    async with Scheduler(
        Boxed, tasks(), engine, Schedule(group_size=2, oversample=cut(extra_groups=1, carry=1)), sandboxes=sandboxes
    ) as scheduler:
        first = await scheduler.collect(1)
        assert ids(first) == ["t1"]
        assert batch_stats(first).rollouts == LifecycleCounts(started=4, finished=2, carried=2)
        assert batch_stats(first).groups == LifecycleCounts(started=2, finished=1, carried=1)
        assert batch_stats(first).requests == LifecycleCounts(started=11, finished=10, carried=1)
        (sandbox,) = sandboxes.leased
        engine.let.set()
        await settle()
        assert engine._played["t0/1"] == 2  # the turn in flight has ended; the next one waits at the gate
        await engine.load_adapter(None, version=1)
        second = await scheduler.collect(1)
        assert ids(second) == ["t0"]
        assert batch_stats(second).rollouts == LifecycleCounts(started=2, resumed=2, finished=2, carried=2)
        assert sandbox not in sandboxes.leased
    (segment,) = second.rollouts[1].segments
    assert [v.version for turn in segment.turns for v in turn.versions] == [0, 0, 1]
    assert second.metrics()["staleness/max"] == 1


async def test_a_group_at_the_staleness_bound_is_waited_for() -> None:
    engine = Held(lambda name, turn: name == "t0/0")
    async with Scheduler(
        Say, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=1, carry=1))
    ) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t1"]
        await engine.load_adapter(None, version=1)
        second = asyncio.create_task(scheduler.collect(1))
        await settle()
        assert not second.done()
        engine.let.set()
        assert ids(await second) == ["t0"]


async def test_a_group_beyond_the_staleness_bound_is_dropped() -> None:
    engine = Held(lambda name, turn: name == "t0/0")
    async with Scheduler(
        Say, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=1, carry=1))
    ) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t1"]
        await engine.load_adapter(None, version=2)
        second = await scheduler.collect(1)
        assert ids(second) == ["t2"]
        assert batch_stats(second).groups == LifecycleCounts(started=2, resumed=1, finished=1, dropped=1, carried=1)


def test_a_rollouts_time_limit_is_paused_while_it_waits_for_the_next_batch() -> None:
    class Limited(Say):
        limits = ag.Limits(seconds=10)

    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep(4 if session.startswith("t0") else 1)
            return await super().generate(token_ids, session=session, **given)

    async def play() -> Groups:
        engine = Slow([call("look"), say("1")])
        async with Scheduler(
            Limited, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=1, carry=1))
        ) as scheduler:
            await scheduler.collect(1)
            await asyncio.sleep(1000)
            await engine.load_adapter(None, version=1)
            return await scheduler.collect(1)

    groups = run_in_virtual_time(play())
    assert [(r.group_id, r.stop_reason) for r in groups.rollouts] == [("t0", "answer")]


def test_waiting_at_the_shut_gate_does_not_count_as_running_time() -> None:
    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep(4 if session.startswith("t0") else 1)
            return await super().generate(token_ids, session=session, **given)

    async def play() -> Groups:
        engine = Slow([call("look"), say("1")])
        async with Scheduler(
            Say, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=1, carry=1))
        ) as scheduler:
            await scheduler.collect(1)
            await asyncio.sleep(1000)
            await engine.load_adapter(None, version=1)
            return await scheduler.collect(1)

    groups = run_in_virtual_time(play())
    assert ids(groups) == ["t0"]
    assert batch_stats(groups).kept_s == pytest.approx(8.0)
