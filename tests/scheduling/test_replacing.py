"""Groups without a signal, which are replaced."""

from agentgym.scheduling.accounting import LifecycleCounts
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from tests.scheduling.scheduled import Say, Signals, batch_stats, ids, tasks


async def test_groups_without_signal_are_replaced_and_counted() -> None:
    async with Scheduler(
        Say, tasks(), Signals(), Schedule(group_size=2, oversample=OversampleConfig(replace=10))
    ) as scheduler:
        groups = await scheduler.collect(3)
    assert ids(groups) == ["t1", "t3", "t5"]
    assert batch_stats(groups).groups == LifecycleCounts(started=6, finished=3, dropped=3)
    assert batch_stats(groups).rollouts == LifecycleCounts(started=12, finished=6, dropped=6)
    numbers = groups.metrics()
    assert (numbers["reward"], numbers["oversample/reward_of_all"]) == (0.5, 0.75)
    assert numbers["groups/without_signal_replaced"] == 3


async def test_replacements_are_bounded_separately_for_each_batch() -> None:
    async with Scheduler(
        Say, tasks(), Signals(), Schedule(group_size=2, oversample=OversampleConfig(replace=1))
    ) as scheduler:
        first, second = [await scheduler.collect(3) for _ in range(2)]
    assert [batch_stats(g).without_signal for g in (first, second)] == [1, 1]
    assert (ids(first), ids(second)) == (["t1", "t2", "t3"], ["t5", "t6", "t7"])
    assert batch_stats(second).groups == LifecycleCounts(started=4, finished=3, dropped=1)
