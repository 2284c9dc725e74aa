"""Parts of task sequences: splits that cannot overlap, and filters."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import agentgym as ag
from agentgym.data.chosen import overlap
from agentgym.environments.task_rows import _in_both
from agentgym.run.preflight import hold_checked
from agentgym.scheduling import batches
from agentgym.testing import check_env, say
from agentgym.testing.env_checks.declared import check_tasks


class Sum(ag.Task):
    answer: int = 0


def tasks(*contents: int) -> list[Sum]:
    return [Sum(id=number, prompt=f"{content}?", answer=content) for number, content in enumerate(contents)]


class Doubled(ag.ToolEnv[Sum]):
    """One held-out row is a training row with another id."""

    @classmethod
    def tasks(cls, split: ag.Split) -> Any:
        rows = [{"id": i, "prompt": f"{i % 7}?", "answer": 0} for i in range(8)]
        return rows[:7] if split == "train" else rows[7:]

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "0")


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=30, max_size=90), st.integers(0, 5))
def test_parts_hold_each_task_once_and_share_no_content(contents: list[int], seed: int) -> None:
    given = tasks(*contents, *range(100, 130))
    parts = ag.split(given, train=0.6, test=0.4, seed=seed)
    assert sorted(int(task.id) for part in parts.values() for task in part) == list(range(len(given)))
    assert overlap(parts) is None
    assert {t.answer for t in parts["train"]} & {t.answer for t in parts["test"]} == set()


def test_shares_are_approximate_and_depend_on_the_seed() -> None:
    given = ag.Procedural(lambda i: Sum(id=i, prompt=f"{i}?"), range(2000))
    first, other = (ag.split(given, train=0.8, test=0.2, seed=seed) for seed in (0, 1))
    assert 340 < len(first["test"]) < 460
    assert [task.id for task in first["test"]] != [task.id for task in other["test"]]


def test_a_growing_data_set_moves_no_task_to_another_part() -> None:
    small = ag.split(tasks(*range(60)), train=0.7, test=0.3)
    large = ag.split(tasks(*range(90)), train=0.7, test=0.3)
    for name in ("train", "test"):
        assert {t.id for t in small[name]} <= {t.id for t in large[name]}


def test_tasks_with_the_same_key_are_in_the_same_part() -> None:
    parts = ag.split(tasks(*range(100)), train=0.5, test=0.5, by=lambda task: task.answer % 10)
    assert {t.answer % 10 for t in parts["train"]} & {t.answer % 10 for t in parts["test"]} == set()


def test_an_id_or_content_in_two_parts_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"the id '0' is in '\w+' and in '\w+'; a held-out task"):
        ag.split([Sum(id=0, prompt=f"{i}?") for i in range(40)], train=0.5, test=0.5)
    with pytest.raises(ValueError, match=r"'\d+' in '\w+' and '\d+' in '\w+' are equal except for their ids"):
        ag.split(tasks(*[3] * 40), train=0.5, test=0.5, by=lambda task: task.id)


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ({}, "shares: pass two or more"),
        ({"train": 1.0}, "shares: pass two or more"),
        ({"train": 0.9, "test": 0.2}, "got train=0.9, test=0.2"),
        ({"train": 1.0, "test": 0.0}, "shares: pass two"),
        ({"train": 0.999, "test": 0.001}, "^test: this part got none of the 3 tasks"),
    ],
)
def test_invalid_shares_are_refused(shares: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ag.split(tasks(1, 2, 3), seed=0, by=None, **shares)


def test_rows_that_are_not_tasks_are_refused_with_how_to_convert_them() -> None:
    rows: Any = [{"id": 1, "prompt": "x"}]
    with pytest.raises(
        ValueError, match=r"number 0 is not a task but .*; to turn rows into tasks, write ag\.Rows\(data, MyTask\)"
    ):
        ag.split(rows, train=0.5, test=0.5)


def test_a_filter_is_lazy_keeps_the_order_and_counts_skipped_tasks() -> None:
    looked: list[int] = []

    def make(index: int) -> Sum:
        looked.append(index)
        return Sum(id=index, prompt="x", answer=index)

    even = ag.where(ag.Procedural(make, range(9)), lambda task: task.answer % 2 == 0)
    assert looked == []
    assert ([t.answer for t in even], len(even), even.left_out) == ([0, 2, 4, 6, 8], 5, 4)
    assert ([t.answer for t in even[3:]], repr(even)) == ([6, 8], "Chosen(5 of 9)")


def test_a_filter_that_keeps_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="where: none of 2 tasks is kept"):
        len(ag.where(tasks(1, 2), lambda task: False))


async def test_check_env_finds_held_out_rows_among_the_training_rows() -> None:
    with pytest.raises(AssertionError, match=r"1 of 1 test tasks are in train under another id \('0' and '7'\)"):
        await check_env(Doubled, tasks(0)[0], oracle=[say("0")])


def test_a_run_warns_about_held_out_rows_among_the_training_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ag.RunConfig(recipe="doubled", env="doubled", model="tiny", max_steps=1, prompts_per_step=2, eval_tasks=1)
    with caplog.at_level(logging.WARNING), hold_checked(run, Doubled, tmp_path):
        pass
    assert "Doubled.tasks: '0' in 'train' and '7' in 'test' are equal except for their ids" in caplog.text


def test_a_run_accepts_parts_and_filters_as_tasks() -> None:
    parts: dict[str, Sequence[Sum]] = dict(ag.split(tasks(*range(50)), train=0.5, test=0.5))

    class Halves(Doubled):
        @classmethod
        def tasks(cls, split: ag.Split) -> Any:
            return ag.where(parts[split], lambda task: task.answer != 3)

    drawn = [task.id for batch in batches(Halves, 4, 3, seed=0) for task in batch]
    assert len(set(drawn)) == 12
    assert set(drawn) <= {task.id for task in parts["train"]} - {"3"}


def test_a_run_warns_about_indices_in_both_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Made(Doubled):
        test = range(5000, 5010)

        @classmethod
        def tasks(cls, split: ag.Split) -> Any:
            return ag.Procedural(lambda i: Sum(id=i, prompt=f"{i}?"), range(9000) if split == "train" else cls.test)

    run = ag.RunConfig(recipe="made", env="made", model="tiny", max_steps=1, prompts_per_step=2, eval_tasks=4)
    with caplog.at_level(logging.WARNING), hold_checked(run, Made, tmp_path / "both"):
        pass
    assert "Made.tasks: train and test share 4 ids among the 4 test tasks that were compared ('5000'" in caplog.text
    assert check_tasks(Made)[0].wrong.startswith("train and test share 10 ids among the 10 test tasks")
    caplog.clear()
    Made.test = range(9000, 9010)
    with caplog.at_level(logging.WARNING), hold_checked(run, Made, tmp_path / "apart"):
        pass
    assert "share" not in caplog.text


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (range(10), range(10, 20), []),
        (range(0, 10**12, 2), range(1, 10**12, 2), []),
        (range(0, 10**12), range(10**11, 10**12, 7), [10**11 + 7 * i for i in range(64)]),
        (range(9, -1, -1), range(5), [0, 1, 2, 3, 4]),
        (range(0), range(5), []),
    ],
)
def test_common_indices_of_two_ranges_are_found_without_iterating(one: range, other: range, both: list[int]) -> None:
    assert _in_both(one, other) == both
