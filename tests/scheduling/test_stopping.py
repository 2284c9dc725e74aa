"""A scheduler that resumes in another process from where one was stopped."""

import json
from typing import Any

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.scheduling.accounting import LifecycleCounts
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import TaskSampler
from tests.scheduling.scheduled import Held, Say, Signals, batch_stats, cut, ids, settle, tasks


def resumed(state: dict[str, Any]) -> TaskSampler[ag.Task]:
    """Return another process's sampler, with a state that was written to a file and read back."""
    sampler = TaskSampler(tasks())
    sampler.load_state_dict([json.loads(json.dumps(state))])
    return sampler


async def test_rollouts_carried_when_a_run_stopped_are_dropped_and_their_tasks_run_again() -> None:
    engine = Held(lambda name, turn: name.startswith(("t1/", "t3/")))
    settings = cut(extra_groups=2, carry=5)
    async with Scheduler(Say, tasks(), engine, Schedule(group_size=2, oversample=settings)) as scheduler:
        first = await scheduler.collect(2)
        state = scheduler.state_dict()
    assert (batch_stats(first).groups.carried, batch_stats(first).requests.carried) == (2, 4)
    assert (state["drawn"], state["unplayed"], state["batches"]) == (4, [1, 3], 1)
    async with Scheduler(
        Say, resumed(state), Scripted([say("1")]), Schedule(group_size=2, oversample=settings)
    ) as scheduler:
        second = await scheduler.collect(2)
        third = await scheduler.collect(2)
    assert ids(second) == ["t1", "t3"]
    assert batch_stats(second).groups == LifecycleCounts(resumed=2, dropped=2, started=4, finished=2, carried=2)
    assert batch_stats(second).rollouts == LifecycleCounts(resumed=4, dropped=4, started=8, finished=4, carried=4)
    assert (batch_stats(second).requests.resumed, batch_stats(second).requests.dropped) == (4, 4)
    assert batch_stats(third).groups.resumed == 2
    assert batch_stats(third).groups.dropped == 0


async def test_rollouts_run_ahead_when_a_run_stopped_count_as_started_and_dropped() -> None:
    async with Scheduler(Say, tasks(), Scripted([say("1")]), Schedule(group_size=2, max_staleness=1)) as scheduler:
        first = await scheduler.collect(3)
        await settle()
        state = scheduler.state_dict()
    assert batch_stats(first).groups.carried == 3
    assert state["in_play"]["tokens"] > 0
    async with Scheduler(
        Say, resumed(state), Scripted([say("1")]), Schedule(group_size=2, max_staleness=1)
    ) as scheduler:
        second = batch_stats(await scheduler.collect(3))
    assert second.groups.resumed + second.groups.started == 3 + 6
    assert (second.groups.finished, second.groups.dropped, second.groups.carried) == (3, 3, 3)
    assert second.dropped_tokens == state["in_play"]["tokens"]


async def test_a_resumed_run_draws_the_same_tasks_and_seeds_as_one_that_never_stopped() -> None:
    seeds: list[int | None] = []

    class Seeded(Say):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return await super().reset(seed=seed, options=options)

    async with Scheduler(Seeded, tasks(), Scripted([say("1")]), Schedule(group_size=1, seed=5)) as scheduler:
        await scheduler.collect(2)
        state = scheduler.state_dict()
        await scheduler.collect(2)
    async with Scheduler(Seeded, resumed(state), Scripted([say("1")]), Schedule(group_size=1, seed=5)) as scheduler:
        await scheduler.collect(2)
    assert seeds[2:4] == seeds[4:]
    assert len(set(seeds)) == 4


async def test_groups_dropped_before_a_stop_are_not_run_again() -> None:
    engine = Held(lambda name, turn: not name.startswith("t1/"))
    async with Scheduler(Say, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=2))) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t1"]
        state = scheduler.state_dict()
    assert (state["drawn"], state["unplayed"], state["in_play"]["resumed"]) == (3, [], 0)
    async with Scheduler(Say, resumed(state), Scripted([say("1")]), Schedule(group_size=1)) as scheduler:
        assert ids(await scheduler.collect(2)) == ["t3", "t4"]


async def test_groups_replaced_ahead_of_a_stop_are_counted_even_after_a_second_stop() -> None:
    replacing = OversampleConfig(replace=10)
    async with Scheduler(
        Say, tasks(), Signals(), Schedule(group_size=2, max_staleness=1, oversample=replacing)
    ) as scheduler:
        await scheduler.collect(3)
        await settle()
        state = scheduler.state_dict()
    groups = state["in_play"]["started"] + state["in_play"]["resumed"]
    assert groups > 3 == len(state["unplayed"])
    assert state["in_play"]["tokens"] == groups * 2 * len("1<")
    async with Scheduler(Say, resumed(state), Signals(), Schedule(group_size=2, max_staleness=1)) as scheduler:
        assert scheduler.state_dict() == state
