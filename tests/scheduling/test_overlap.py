"""Batches that run while others are trained on."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentgym.engines.scripted import Scripted, call, say
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.completion import Completion
from tests.scheduling.scheduled import Held, Say, Signals, batch_stats, ids, settle, tasks


async def test_groups_are_bounded_by_staleness_and_a_filtered_one_frees_its_place() -> None:
    started: set[str] = set()

    class Watched(Say):
        async def setup(self) -> None:
            started.add(self.task.id)

    class Some(Signals):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            if not session.startswith("t0/"):
                await asyncio.Event().wait()
            return await super().generate(token_ids, session=session, **given)

    for replace, accepted in ((0, 4), (1, 5)):
        started.clear()
        async with Scheduler(
            Watched,
            tasks(),
            Some(),
            Schedule(group_size=2, max_staleness=1, oversample=OversampleConfig(replace=replace)),
        ) as scheduler:
            collecting = asyncio.create_task(scheduler.collect(2))
            await settle()
            assert len(started) == accepted
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)


async def test_the_next_batch_runs_while_this_one_is_trained_on() -> None:
    engine = Scripted([say("1")])
    async with Scheduler(Say, tasks(), engine, Schedule(group_size=1, max_staleness=1)) as scheduler:
        first = await scheduler.collect(2)
        await settle()  # training
        await engine.load_adapter(None, version=1)
        second = await scheduler.collect(2)
    assert (ids(first), ids(second)) == (["t0", "t1"], ["t2", "t3"])
    assert {v.version for r in second.rollouts for s in r.segments for t in s.turns for v in t.versions} == {0}
    assert second.metrics()["staleness/max"] == 1


@pytest.mark.parametrize("staleness", [1, 2, 3])
async def test_no_group_is_ever_staler_than_the_bound_and_none_is_lost(staleness: int) -> None:
    dice = random.Random(staleness)

    class Uneven(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            for _ in range(int(dice.paretovariate(0.6)) % 500):
                await asyncio.sleep(0)
            return await super().generate(token_ids, **given)

    engine, seen, stalest = Uneven([call("look"), call("look"), say("1")]), list[str](), 0
    async with Scheduler(Say, tasks(), engine, Schedule(group_size=3, max_staleness=staleness)) as scheduler:
        for version in range(1, 40):
            groups = await scheduler.collect(2)
            versions = [v.version for r in groups.rollouts for s in r.segments for t in s.turns for v in t.versions]
            assert engine.version - min(versions) == groups.metrics()["staleness/max"] <= staleness
            stalest = max(stalest, engine.version - min(versions))
            seen += ids(groups)
            assert (len(groups), batch_stats(groups).rollouts.dropped) == (2, 0)
            for _ in range(dice.randrange(100)):
                await asyncio.sleep(0)
            await engine.load_adapter(None, version=version)
    assert stalest == staleness
    assert len(set(seen)) == len(seen) == 78


async def test_nothing_runs_ahead_of_the_last_batch() -> None:
    async with Scheduler(Say, tasks(), Scripted([say("1")]), Schedule(group_size=1, max_staleness=2)) as scheduler:
        batches = [await scheduler.collect(2, to_come=to_come) for to_come in (3, 2, 1, 0)]
    assert [batch_stats(groups).rollouts.started for groups in batches] == [6, 2, 0, 0]
    assert [batch_stats(groups).rollouts.carried for groups in batches] == [4, 4, 2, 0]


async def test_extra_groups_are_returned_if_they_would_be_too_old_for_the_next_batch() -> None:
    engine = Held(lambda name, turn: False)
    async with Scheduler(Say, tasks(), engine, Schedule(group_size=1, max_staleness=2)) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t0"]
        await settle()  # two more are ready, sampled under version 0
        await engine.load_adapter(None, version=2)
        second = await scheduler.collect(1)
    assert ids(second) == ["t1", "t2"]
    assert second.metrics()["staleness/max"] == 2
