"""Endless tasks from a generator, in runs, mixtures and slices."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.data.endless import Endless
from agentgym.environments.mixture import Member, mix
from agentgym.run.tasks.chosen import only_tasks
from agentgym.scheduling.task_sampler import Sharding, TaskSampler, batches


def generate(seed: int) -> Iterator[ag.Task]:
    rng, number = random.Random(seed), 0
    while True:
        yield ag.Task(id=f"{seed}-{number}", prompt=f"{rng.randint(0, 9)}?")
        number += 1


def numbers(seed: int) -> Iterator[dict[str, str]]:
    return ({"id": task.id, "prompt": "x"} for task in generate(seed))


class Stream(ag.ToolEnv[ag.Task]):
    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Endless[ag.Task]:
        return ag.Endless(generate, seed=0 if split == "train" else 1_000_000)

    @ag.reward
    def zero(self) -> float:
        return 0.0


class RowStream(Stream):
    @classmethod
    def tasks(cls, split: ag.Split) -> "ag.Endless[ag.Task]":
        return ag.Endless(numbers)  # type: ignore[arg-type]  # rows are taken, too


def ids(tasks: object, count: int) -> list[str]:
    return [task.id for task in islice(iter(tasks), count)]  # type: ignore[call-overload]


def test_tasks_come_in_the_generators_order_and_depend_on_the_seed() -> None:
    tasks = ag.Endless(generate, seed=3)
    assert ids(tasks, 3) == ids(tasks[:3], 3) == ids(tasks, 3) == ["3-0", "3-1", "3-2"]
    assert [tasks[i].id for i in (2, 4, 0, 1)] == ["3-2", "3-4", "3-0", "3-1"]
    assert ids(tasks[2:], 2) == ids(tasks[2:4], 2) == ["3-2", "3-3"]
    assert ids(tasks[1::2], 2) == ["3-1", "3-3"]


def test_operations_that_need_the_end_are_refused() -> None:
    with pytest.raises(IndexError, match="cannot be indexed from their end"):
        ag.Endless(generate)[-1]
    with pytest.raises(IndexError, match="cannot be indexed from their end"):
        ag.Endless(generate)[:-1]


def test_a_slice_with_step_0_is_refused_as_for_a_list() -> None:
    with pytest.raises(ValueError, match="step of a slice cannot be 0"):
        ag.Endless(generate)[0:5:0]


def test_a_generator_that_ends_is_an_error_with_its_position() -> None:
    with pytest.raises(ValueError, match="the generator ended after 2 tasks"):
        ids(ag.Endless(lambda seed: islice(generate(seed), 2)), 3)


def test_filtered_endless_tasks_are_endless_and_matching_none_is_an_error() -> None:
    even = ag.where(ag.Endless(generate), lambda task: int(task.id.partition("-")[2]) % 2 == 0)
    assert isinstance(even, Endless)
    assert ids(even, 3) == ["0-0", "0-2", "0-4"]
    with pytest.raises(ValueError, match="none of 10000 tasks in a row is kept"):
        ag.where(ag.Endless(generate), lambda task: False)[0]
    rare = ag.where(ag.Endless(generate), lambda task: int(task.id.partition("-")[2]) % 10_000 == 0)
    assert ids(rare, 3) == ["0-0", "0-10000", "0-20000"]  # 9,999 are skipped between two.


def drawn(env: type[ag.Env[Any]], seed: int, count: int = 4) -> tuple[set[str], list[int]]:
    """Return the seeds that the generator got, and the tasks' numbers in order."""
    names = [task.id.rsplit("-", 1) for batch in batches(env, 2, count // 2, seed=seed) for task in batch]
    return {seed for seed, _ in names}, [int(number) for _, number in names]


def test_a_run_takes_endless_tasks_in_order_from_a_seed_derived_from_its_own() -> None:
    for env in (Stream, RowStream):
        seeds, numbers = drawn(env, 5)
        assert numbers == [0, 1, 2, 3]
        assert len(seeds) == 1
        assert seeds == drawn(env, 5)[0] != drawn(env, 6)[0]
        assert seeds != {"5"}


@pytest.mark.parametrize("world", [1, 3])
def test_a_resumed_run_continues_where_the_generator_was(world: int) -> None:
    def samplers(count: int) -> list[TaskSampler[ag.Task]]:
        sharded = [Sharding(prompts=4, rank=rank, world=count) for rank in range(count)]
        return [TaskSampler.for_training(Stream, sharding, seed=7) for sharding in sharded]

    def draw(sampler: TaskSampler[ag.Task], count: int) -> list[str]:
        found = [sampler.next() for _ in range(count)]
        for sampled in found:
            assert sampled is not None
            sampler.played(sampled.number)
        return [sampled.task.id for sampled in found if sampled is not None]

    stopped = samplers(2)
    before = [draw(sampler, 4) for sampler in stopped]
    states = [sampler.state_dict() for sampler in stopped]
    resumed = samplers(world)
    for sampler in resumed:
        sampler.load_state_dict(states)
    after = [draw(sampler, 3 * sampler._sharding.share) for sampler in resumed]
    seen = [name for part in (*before, *after) for name in part]
    seed = seen[0].split("-")[0]
    assert sorted(seen, key=lambda name: int(name.split("-")[1])) == [f"{seed}-{number}" for number in range(20)]


def test_any_or_all_members_of_a_mixture_may_be_endless() -> None:
    both = mix({"one": Member(Stream, 1), "two": Member(RowStream, 1)})
    names = sorted(task.id for batch in batches(both, 4, 1, seed=5) for task in batch)
    seeds = [name.split("-")[0] for name in names]
    assert [name.split("-")[1] for name in names] == ["0", "1", "0", "1"]
    assert seeds[0] == seeds[1]
    assert seeds[2] == seeds[3]
    assert seeds[0].removeprefix("one/") != seeds[2].removeprefix("two/")
    assert [task.id for task in both.tasks("test")[:2]] == ["one/1000000-0", "two/0-0"]


def test_a_file_of_ids_cannot_select_endless_tasks(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("0-0\n")
    with pytest.raises(ValueError, match="the training tasks of Stream are endless"):
        only_tasks(Stream, tmp_path / "ids")
