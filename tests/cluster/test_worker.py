"""Shares of rollout workers, without Ray: two workers in this process run the same rollouts as one alone."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.cluster.worker import Played, RolloutWorker
from agentgym.run.collector import joined
from agentgym.run.peers import Share
from agentgym.scheduling.accounting import Groups
from agentgym.scheduling.schedule import Schedule
from agentgym.types import Group

RUN = ag.RunConfig(recipe="shares", env="nim", model="tiny", prompts_per_step=4, group_size=2)
ASKED = Schedule(prompts_per_step=4, group_size=2, seed=3)


def ids(groups: Sequence[Group]) -> dict[str, list[int]]:
    return {r.rollout_id: [i for s in r.segments for i in s.token_ids.tolist()] for g in groups for r in g.rollouts}


async def opened(world: int) -> list[RolloutWorker]:
    workers = [RolloutWorker(RUN, Share(rank, world)) for rank in range(world)]
    for worker in workers:
        await worker.open()
    return workers


async def rollout(workers: Sequence[RolloutWorker]) -> tuple[Groups, list[Any]]:
    shares: list[Played] = [await worker.play_share(None) for worker in workers]
    return joined(each.share for each in shares), [each.state for each in shares]


async def test_two_workers_run_the_groups_of_one_worker_in_the_same_order() -> None:
    [alone], pair = await opened(1), await opened(2)
    for worker in (alone, *pair):
        await worker.begin(ASKED, [])
    for _ in range(2):
        (one, _), (two, _) = await rollout([alone]), await rollout(pair)
        assert [group.group_id for group in one] == [group.group_id for group in two]
        assert [group.place for group in one] == [group.place for group in two]
        assert ids(one) == ids(two)
    await asyncio.gather(*(worker.close() for worker in (alone, *pair)))


@pytest.mark.slow
async def test_a_replacement_worker_runs_the_rollouts_of_the_lost_one() -> None:
    pair, others = await opened(2), await opened(2)
    for worker in (*pair, *others):
        await worker.begin(ASKED, [])
    _, states = await rollout(pair)
    await rollout(others)
    fresh = (await opened(2))[1]
    await fresh.begin(ASKED, states, alone=True)
    (mended, _), (whole, _) = await rollout([pair[0], fresh]), await rollout(others)
    assert ids(mended) == ids(whole)
    await asyncio.gather(*(worker.close() for worker in (*pair, *others, fresh)))


async def test_running_rollouts_of_a_lost_worker_are_counted_as_dropped() -> None:
    pair = await opened(2)
    states = [dict(await worker.begin(ASKED, [])) for worker in pair]
    states[1]["in_play"] = {**states[1]["in_play"], "started": 2}
    fresh = (await opened(2))[1]
    await fresh.begin(ASKED, states, alone=True)
    share = await fresh.play_share(None)
    assert share.share[1] is not None
    counts = share.share[1].rollouts
    assert (counts.started, counts.finished, counts.dropped) == (8, 4, 4)
    await asyncio.gather(*(worker.close() for worker in (*pair, fresh)))


@pytest.mark.slow
async def test_three_workers_can_continue_the_work_of_two() -> None:
    pair, alone = await opened(2), await opened(1)
    for worker in (*pair, *alone):
        await worker.begin(ASKED, [])
    _, states = await rollout(pair)
    await rollout(alone)
    three = await opened(3)
    for worker in three:
        await worker.begin(ASKED, states)
    (more, _), (one, _) = await rollout(three), await rollout(alone)
    assert ids(more) == ids(one)
    await asyncio.gather(*(worker.close() for worker in (*pair, *alone, *three)))


async def test_a_worker_evaluates_its_tasks_in_the_given_order() -> None:
    [worker] = await opened(1)
    tasks = ag.find_env("nim").tasks("test")[:3]
    groups = await worker.play(list(tasks), Schedule(group_size=2, same_instance=False))
    assert [group.group_id for group in groups] == [task.id for task in tasks]
    assert [len(group.rollouts) for group in groups] == [2, 2, 2]
    assert np.isfinite([r.reward for g in groups for r in g.rollouts if r.reward is not None]).all()
    await worker.close()
