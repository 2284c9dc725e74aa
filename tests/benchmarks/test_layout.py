"""The layout benchmark compares the training results from lists and from rollouts."""

from pathlib import Path
from typing import Any

import pytest

from agentgym.samples import build_samples
from benchmarks.harness import load_workloads
from benchmarks.layout.__main__ import WAYS as KITS, goals
from benchmarks.layout.merging import merge
from benchmarks.layout.ours import WAYS, one_batch, told
from benchmarks.layout.rows import make_groups, make_samples

FORKS = {"n_traj": 16, "turns": 5, "max_len": 512, "compaction_p": 0.5, "fork_p": 0.5, "prompt_median": 100}


def workload() -> Any:
    return load_workloads(None).stepwise(seed=3, **FORKS)


@pytest.mark.parametrize("way", WAYS)
def test_lists_and_rollouts_give_the_same_training(way: str) -> None:
    turns, layout = WAYS[way]
    batch = workload()
    lists = told(one_batch(make_samples(batch, merge=turns), layout, 0))
    rollouts = told(one_batch(build_samples(make_groups(batch), merge=turns), layout, 0))
    assert lists["trained"] == rollouts["trained"]
    assert lists["trained_tokens"] == rollouts["trained_tokens"] == sum(map(sum, batch.loss_masks))
    assert lists.get("rows") == rollouts.get("rows")


def test_one_different_token_changes_the_result() -> None:
    batch = workload()
    before = told(one_batch(make_samples(batch), "padded", 0))
    batch.responses[7] = [batch.responses[7][0] + 1, *batch.responses[7][1:]]
    after = told(one_batch(make_samples(batch), "padded", 0))
    assert before["trained"] != after["trained"]
    assert before["rows"] != after["rows"]


def test_lists_joined_first_give_the_same_samples_as_merged_ones() -> None:
    batch = workload()
    first, later = make_samples(batch, merge=True), merge(make_samples(batch))
    assert len(first) == len(later)
    for one, other in zip(first, later, strict=True):
        assert (one.rollout_id, one.segment, one.step) == (other.rollout_id, other.segment, other.step)
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        assert one.logprobs[one.loss_mask].tolist() == other.logprobs[other.loss_mask].tolist()
        assert one.weight == pytest.approx(other.weight)


def test_without_the_other_kits_their_goals_count_as_not_measured() -> None:
    figures = dict.fromkeys(
        [f"x_{way}_{name}" for way in KITS for name in ("same", "lists_tokens")]
        + [f"x_{name}_tokens" for name in ("two_segment", "merged", "unique")]
        + [f"step_{name}_cpu_s" for name in ("packed_whole", "packed_merged", "tree_turns", "padded_turns")],
        1.0,
    )
    compared = {name: goal for name, goal in goals(figures, ["x"]).items() if "'s" in name}
    assert len(compared) == 8
    assert all(goal["met"] is None for goal in compared.values())


def test_workloads_may_import_files_next_to_them(tmp_path: Path) -> None:
    (tmp_path / "sizes_beside.py").write_text("SIZE = 7\n")
    (tmp_path / "other.py").write_text("from sizes_beside import SIZE\n")
    assert load_workloads(tmp_path / "other.py").SIZE == 7
