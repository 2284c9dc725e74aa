"""The scheduler: tasks are drawn once, failures are counted, and all counts add up."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, raw, say
from agentgym.environments.env import Split
from agentgym.errors import AgentGymError
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling import run_groups
from agentgym.scheduling.accounting import Groups, LifecycleCounts, raise_if_all_failed
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from agentgym.types.completion import Completion
from tests.scheduling.scheduled import Boxed, Held, Say, batch_stats, cut, ids, task, tasks


async def test_a_task_is_not_drawn_again_while_it_is_running() -> None:
    engine = Held(lambda name, turn: name == "t0/0" and not engine.let.is_set())
    names = [0, 1, 2, 0, 1, 2]
    async with Scheduler(
        Say, map(task, names), engine, Schedule(group_size=1, oversample=cut(extra_groups=1, carry=5))
    ) as scheduler:
        first, second = [await scheduler.collect(1) for _ in range(2)]
        assert (ids(first), ids(second)) == (["t1"], ["t2"])
        engine.let.set()
        third, fourth = [await scheduler.collect(1) for _ in range(2)]
        assert sorted(ids(third) + ids(fourth)) == ["t0", "t1"]


async def test_more_groups_at_once_than_there_are_tasks_is_an_error() -> None:
    def again() -> Iterator[ag.Task]:
        while True:
            yield from tasks(2)

    async with Scheduler(Say, again(), Scripted([say("1")]), Schedule(group_size=1)) as scheduler:
        with pytest.raises(ValueError, match=r"^tasks: all of them are in progress \(2\)"):
            await scheduler.collect(3)


@pytest.mark.parametrize(
    ("count", "prompts", "settings"),
    [
        (3, 2, {"oversample": cut(extra_groups=1, carry=2)}),
        (3, 2, {"oversample": cut(extra_groups=1)}),
        (10, 8, {"oversample": cut(extra_groups=2)}),
        (4, 2, {"max_staleness": 1}),
    ],
)
async def test_a_few_more_tasks_than_are_running_are_enough(count: int, prompts: int, settings: dict[str, Any]) -> None:
    class Few(Say):
        @classmethod
        def tasks(cls, split: Split) -> list[ag.Task]:
            return list(tasks(count))

    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], **asked: Any) -> Completion:
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            return await super().generate(token_ids, **asked)

    for seed in range(5):
        rng = random.Random(seed)
        sampler = TaskSampler.for_training(Few, Sharding(prompts=prompts, by_id=True), seed=seed)
        answers = Slow(lambda turn: say("1"))
        async with Scheduler(Few, sampler, answers, Schedule(group_size=2, seed=seed, **settings)) as scheduler:
            assert [len(await scheduler.collect(prompts)) for _ in range(30)] == [prompts] * 30


async def test_if_the_tasks_run_out_the_batch_is_smaller() -> None:
    async with Scheduler(Say, tasks(3), Scripted([say("1")]), Schedule(group_size=1)) as scheduler:
        assert [len(await scheduler.collect(2)) for _ in range(3)] == [2, 1, 0]


async def test_a_failed_rollout_does_not_complete_a_group_if_another_can() -> None:
    class Bad(Say):
        async def setup(self) -> None:
            if next(made) == 0:
                raise ValueError("broken")

    made = iter(range(100))
    async with Scheduler(
        Bad, tasks(), Scripted([say("1")]), Schedule(group_size=2, oversample=cut(extra_rollouts=1))
    ) as scheduler:
        groups = await scheduler.collect(1)
    assert [r.reward for r in groups.rollouts] == [None, 1.0, 1.0]
    assert batch_stats(groups).rollouts == LifecycleCounts(started=3, finished=2, failed=1)


async def test_groups_that_cannot_be_completed_do_not_block_the_batch() -> None:
    class Bad(Say):
        async def setup(self) -> None:
            if self.task.id == "t0":
                raise ValueError("broken")

    async with Scheduler(Bad, tasks(), Scripted([say("1")]), Schedule(group_size=2)) as scheduler:
        groups = await scheduler.collect(2)
    assert batch_stats(groups).groups == LifecycleCounts(started=2, finished=1, failed=1)
    assert batch_stats(groups).rollouts == LifecycleCounts(started=4, finished=2, failed=2)


async def test_a_batch_in_which_all_fail_is_returned_to_the_caller() -> None:
    class Bad(Say):
        async def setup(self) -> None:
            raise ValueError("broken")

    async with Scheduler(Bad, tasks(), Scripted([]), Schedule(group_size=2)) as scheduler:
        groups = await scheduler.collect(1)
    assert batch_stats(groups).rollouts == LifecycleCounts(started=2, failed=2)
    with pytest.raises(AgentGymError, match=r"^all 2 rollouts failed; the first one: EnvError: Bad.setup: ValueError"):
        raise_if_all_failed(groups)
    raise_if_all_failed(Groups([]))


def test_inconsistent_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="counts"):
        LifecycleCounts(started=3, finished=1, dropped=1)
    with pytest.raises(ValueError, match="counts"):
        LifecycleCounts(started=1, finished=2, dropped=-1)


class Faulty(Held):
    """An engine that at random calls tools, fails and waits."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda name, turn: False)
        self.dice = random.Random(seed)

    def _next(self, token_ids: Sequence[int], session: str) -> Any:
        return self.dice.choice([call("look"), call("lok"), raw("<tool_call>\n{"), say("0"), say("1"), say("1")])

    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        for _ in range(int(self.dice.paretovariate(0.7)) % 300):
            await asyncio.sleep(0)
        if self.dice.random() < 0.05:
            raise ConnectionError("gone")
        return await super().generate(token_ids, **given)


SETTINGS = {
    "all": (OversampleConfig(), 0),
    "target": (cut(extra_groups=3, extra_rollouts=2), 0),
    "carry": (cut(extra_groups=3, extra_rollouts=1, carry=2), 0),
    "replace": (cut(extra_groups=2, carry=1, replace=4), 0),
    "stale": (OversampleConfig(replace=3), 2),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_with_faults_every_started_item_is_in_exactly_one_count(name: str, sandboxes: FakeSandboxPool) -> None:
    settings, staleness = SETTINGS[name]
    engine, seen = Faulty(7), list[str]()
    async with Scheduler(
        Boxed,
        tasks(),
        engine,
        Schedule(group_size=4, concurrency=16, oversample=settings, max_staleness=staleness),
        sandboxes=sandboxes,
    ) as scheduler:
        totals: dict[str, int] = {}
        for version in range(1, 25):
            groups = await scheduler.collect(4)
            seen += ids(groups)
            for kind in ("rollouts", "groups", "requests"):
                counts = getattr(batch_stats(groups), kind)
                for field in ("started", "finished", "dropped", "failed"):
                    totals[f"{kind} {field}"] = totals.get(f"{kind} {field}", 0) + getattr(counts, field)
                totals[f"{kind} carried"] = counts.carried
            finished = sum(len(group.scored) for group in groups)
            assert batch_stats(groups).rollouts.finished == finished
            assert batch_stats(groups).rollouts.failed == len(groups.rollouts) - finished
            await engine.load_adapter(None, version=version)
        for kind in ("rollouts", "groups", "requests"):
            ended = [totals[f"{kind} {field}"] for field in ("finished", "dropped", "failed", "carried")]
            assert totals[f"{kind} started"] == sum(ended) > 0
    assert len(set(seen)) == len(seen) >= 96
    assert sandboxes.leased == []


async def test_thousands_of_rollouts_do_not_start_in_one_pass_of_the_event_loop() -> None:
    begun = Counter[int]()
    passes = 0

    class Counting(ag.ToolEnv[ag.Task]):
        async def setup(self) -> None:
            begun[passes] += 1

        @ag.reward
        async def fine(self) -> float:
            return 1.0

    async def count() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    counting = asyncio.create_task(count())
    tasks = [ag.Task(id=f"t{n}", prompt=(ag.Message(role="user", content="?"),)) for n in range(100)]
    groups = await run_groups(Counting, tasks, Scripted([say("so")]), n=4, concurrency=400)
    counting.cancel()
    assert len(groups.rollouts) == begun.total() == 400
    assert max(begun.values()) <= 2 * 32
