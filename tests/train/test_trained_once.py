"""No group of a run is trained on twice, whoever hands it in again, also after a resume."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.samples import SampleBatch
from agentgym.train.checks import TrainedOnce
from agentgym.train.trainer import TrainConfig, Trainer
from tests.run.sync.test_proof import batch as moving_samples


def batch(*numbers: int) -> SampleBatch:
    return SampleBatch(
        samples=(),
        groups=len(numbers),
        groups_without_signal=0,
        rollouts=0,
        rollouts_failed=0,
        rollouts_trained=0,
        trained_tokens=0,
        untrained_tokens=0,
        numbers={number: f"task-{number}" for number in numbers},
    )


def test_a_group_that_is_handed_in_twice_is_refused_by_name() -> None:
    once = TrainedOnce()
    once.add(batch(3, 4))
    once.refuse(batch(5))
    with pytest.raises(ValueError, match=r"samples: group 'task-4', number 4 of the run, was trained on before"):
        once.refuse(batch(5, 4))


def test_samples_that_are_of_no_run_are_never_refused() -> None:
    once = TrainedOnce()
    once.add([])
    once.refuse([])
    assert once.state() == []


@given(st.lists(st.lists(st.integers(0, 40), unique=True), max_size=12))
def test_exactly_the_numbers_that_were_trained_on_are_refused_after_a_checkpoint_too(steps: list[list[int]]) -> None:
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
    ranges = once.state()
    assert all(first < end for first, end in ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "neighbouring ranges are joined"


async def test_a_trainer_refuses_a_batch_of_a_run_that_comes_again_after_a_resume_too(tmp_path: Path) -> None:
    config = TrainConfig(device="cpu")
    whole = replace(batch(0, 1), samples=tuple(moving_samples(1)))
    async with Trainer("tiny", config) as trainer:
        await trainer.step(whole)
        with pytest.raises(ValueError, match="group 'task-0', number 0 of the run, was trained on before"):
            await trainer.step(whole)
        trainer.checkpoint(tmp_path, 1)
    async with Trainer("tiny", config) as resumed:
        resumed.resume(tmp_path)
        with pytest.raises(ValueError, match="was trained on before"):
            await resumed.step(whole)
