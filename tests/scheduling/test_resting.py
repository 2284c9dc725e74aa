"""Resting tasks: those without a signal are skipped for some rounds, counted, and kept resting over a stop."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.scheduling import Schedule, Scheduler
from agentgym.scheduling.accounting import BatchStats
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from tests.run.test_resume import SETTINGS


@ag.register("six")
class Six(ag.ToolEnv[ag.Task]):
    """An env with six tasks: two are always solved, two never, and in two the rollouts differ."""

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=f"{kind}{i}", prompt="?") for kind in ("solved", "never", "mixed") for i in range(2)]

    @ag.reward
    def worth(self) -> float:
        return {"solved": 1.0, "never": 0.5}.get(self.task.id[:-1], float(self.answer == "1"))


def sampler(rest_epochs: int, world: int = 1, rank: int = 0, states: Any = ()) -> TaskSampler[ag.Task]:
    sharding = Sharding(prompts=6, rank=rank, world=world, by_id=True)
    made = TaskSampler.for_training(Six, sharding, seed=1, rest_epochs=rest_epochs)
    if states:
        made.load_state_dict([json.loads(json.dumps(state)) for state in states])
    return made


def engine() -> Scripted:
    said = iter(range(1 << 20))
    return Scripted(lambda text: say(str(next(said) % 2)))


def draw(one: TaskSampler[ag.Task], count: int) -> list[str]:
    drawn = [sampled for sampled in (one.next() for _ in range(count)) if sampled]
    for sampled in drawn:
        one.played(sampled.number)
    return [sampled.task.id for sampled in drawn]


async def test_a_resting_task_counts_as_solved_from_the_configured_reward() -> None:
    settings = Schedule(group_size=2, concurrency=1, solved=0.5)
    async with Scheduler(Six, sampler(2), engine(), settings) as scheduler:
        metrics = (await scheduler.collect(6)).metrics()
    assert (metrics["curriculum/rested_solved"], metrics["curriculum/rested_unsolved"]) == (4, 0)


async def test_a_task_without_signal_is_skipped_for_the_configured_rounds_and_counted() -> None:
    settings = Schedule(group_size=2, concurrency=1)
    async with Scheduler(Six, sampler(2), engine(), settings) as scheduler:
        batches = [await scheduler.collect(wanted) for wanted in (6, 2, 2, 6)]
    ids = [{group.group_id[:-1] for group in batch} for batch in batches]
    assert ids == [{"solved", "never", "mixed"}, {"mixed"}, {"mixed"}, {"solved", "never", "mixed"}]
    metrics = [batch.metrics() for batch in batches]
    names = ("rested_solved", "rested_unsolved")
    assert [tuple(int(of[f"curriculum/{name}"]) for name in names) for of in metrics] == [
        (2, 2),
        (0, 0),
        (0, 0),
        (2, 2),
    ]
    assert metrics[0]["curriculum/resting"] == metrics[3]["curriculum/resting"] == 4
    assert sum(of["curriculum/passed_over"] for of in metrics) == 8


async def test_without_rest_epochs_every_task_occurs_in_every_round() -> None:
    async with Scheduler(Six, sampler(0), engine(), Schedule(group_size=2, concurrency=1)) as scheduler:
        for _ in range(3):
            groups = await scheduler.collect(6)
            assert len({group.group_id for group in groups}) == 6
            assert groups.metrics()["curriculum/resting"] == 0


@pytest.mark.parametrize("world", [1, 3])
def test_tasks_keep_resting_after_a_resume_on_any_number_of_processes(world: int) -> None:
    first = sampler(2)
    draw(first, 6)
    first.taught_nothing("solved0", solved=True)
    first.taught_nothing("never1", solved=False)
    states = [first.state_dict()]
    resumed = [sampler(2, world, rank, states) for rank in range(world)]
    assert sum(one.rests().resting for one in resumed) == 2
    again = [one.state_dict() for one in resumed]
    drawn = Counter(draw(sampler(2, states=again), 4 + 4 + 6))
    assert drawn == {
        **dict.fromkeys(("solved0", "never1"), 1),
        **dict.fromkeys(drawn.keys() - {"solved0", "never1"}, 3),
    }


def test_if_all_tasks_rest_those_whose_rest_ends_first_are_used() -> None:
    one = sampler(1)
    for name in draw(one, 6):
        one.taught_nothing(name, solved=True)
    assert len(set(draw(one, 6))) == 6
    assert one.rests() == BatchStats(rested_solved=6, passed_over=6)


def test_resting_requires_tasks_assigned_to_processes_by_id() -> None:
    with pytest.raises(ValueError, match=r"^rest_epochs: only the process that runs a task"):
        TaskSampler([], Sharding(prompts=2), rest_epochs=1)


def test_a_run_rests_tasks_and_is_resumed_with_the_same_rule(tmp_path: Path) -> None:
    run = replace(
        SETTINGS,
        env="six",
        prompts_per_step=6,
        group_size=2,
        rest_epochs=1,
        max_steps=1,
        eval_tasks=0,
        output_dir=tmp_path,
    )
    run = replace(run, max_turn_tokens=1)
    asyncio.run(ag.train_policy(run))
    [line] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["curriculum/rested_solved"] == 2.0
    assert line["curriculum/resting"] >= 4.0
    again = replace(run, output_dir=None, resume=tmp_path)
    with pytest.raises(ValueError, match=r"rest_epochs: the run has 1, not 2"):
        asyncio.run(ag.train_policy(replace(again, rest_epochs=2)))
