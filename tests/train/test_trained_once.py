"""No group of a run is trained on twice, whoever passes it again, even after a resume."""

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, strategies as st

import agentgym as ag
from agentgym.engines.transformers.engine import TransformersEngine
from agentgym.run import Collector
from agentgym.samples import SampleBatch, build_samples
from agentgym.scheduling import Schedule
from agentgym.train.checks import TrainedOnce
from agentgym.train.trainer import TrainConfig, Trainer
from tests.weight_sync.test_proof import batch as moving_samples


def batch(*numbers: int, order: str = "Chase, seed 0") -> SampleBatch:
    return SampleBatch(
        samples=(),
        groups=len(numbers),
        groups_without_signal=0,
        rollouts=0,
        rollouts_failed=0,
        rollouts_trained=0,
        trained_tokens=0,
        untrained_tokens=0,
        places={(order, number): f"task-{number}" for number in numbers},
    )


def test_a_group_passed_twice_is_refused_by_name() -> None:
    once = TrainedOnce()
    once.add(batch(3, 4))
    once.refuse(batch(5))
    with pytest.raises(
        ValueError,
        match=r"samples: group 'task-4', position 4 in the task order of Chase, seed 0, was trained on before",
    ):
        once.refuse(batch(5, 4))


def test_samples_without_a_run_are_never_refused() -> None:
    once = TrainedOnce()
    once.add([])
    once.refuse([])
    assert once.state() == {}


@given(st.lists(st.lists(st.integers(0, 40), unique=True), max_size=12))
def test_exactly_the_trained_positions_are_refused_even_after_a_checkpoint(steps: list[list[int]]) -> None:
    once, seen = TrainedOnce(), set[int]()
    for numbers in steps:
        fresh = [number for number in numbers if number not in seen]
        once.refuse(batch(*fresh))
        once.add(batch(*fresh))
        seen.update(fresh)
        resumed = TrainedOnce()
        resumed.load(once.state())
        once = resumed
    for number in range(42):
        if number in seen:
            with pytest.raises(ValueError, match="was trained on before"):
                once.refuse(batch(number))
        else:
            once.refuse(batch(number))
    ranges = once.state().get("Chase, seed 0", [])
    assert all(first < end for first, end in ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "neighboring ranges are joined"


async def test_a_trainer_refuses_a_repeated_batch_even_after_a_resume(tmp_path: Path) -> None:
    config = TrainConfig(device="cpu")
    whole = replace(batch(0, 1), samples=tuple(moving_samples(1)))
    async with Trainer("tiny", config) as trainer:
        await trainer.step(whole)
        with pytest.raises(ValueError, match="group 'task-0', position 0"):
            await trainer.step(whole)
        trainer.checkpoint(tmp_path, 1)
    async with Trainer("tiny", config) as resumed:
        resumed.resume(tmp_path)
        with pytest.raises(ValueError, match="was trained on before"):
            await resumed.step(whole)


class Guess(ag.ToolEnv[ag.Task]):
    """An env with two tasks that repeat; every second rollout of each is rewarded."""

    scored: ClassVar[Counter[str]] = Counter()

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=name, prompt="Say something.") for name in ("a", "b")]

    @ag.reward
    def second(self) -> float:
        self.scored[self.task.id] += 1
        return float(self.scored[self.task.id] % 2)


async def test_a_custom_loop_may_run_and_train_the_same_tasks_in_each_step() -> None:
    async with Trainer("tiny", TrainConfig(device="cpu")) as trainer, TransformersEngine("tiny") as engine:
        play = Collector(Guess, engine, trainer, None, ag.Sampling(max_tokens=60))
        for seed in range(2):
            groups = await play.collect(Guess.tasks("train"), Schedule(group_size=2, seed=seed))
            samples = build_samples(groups)
            assert samples.trained_tokens > 0
            await trainer.step(samples)


async def test_a_second_schedule_on_one_trainer_needs_another_seed() -> None:
    async with Trainer("tiny", TrainConfig(device="cpu")) as trainer, TransformersEngine("tiny") as engine:
        play = Collector(Guess, engine, trainer, None, ag.Sampling(max_tokens=60))
        for seed, judged in (
            (0, nullcontext()),
            (1, nullcontext()),
            (0, pytest.raises(ValueError, match="a different seed")),
        ):
            async with play.schedule(Schedule(prompts_per_step=2, group_size=2, seed=seed)) as rollouts:
                groups = await rollouts.collect()
            assert [group.place for group in groups] == [(f"Guess, seed {seed}", i) for i in range(2)]
            with judged:
                await trainer.step(build_samples(groups))
