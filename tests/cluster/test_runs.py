"""Runs on a two-node Ray cluster: the same results as without Ray, and complete whatever is lost on the way."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentgym.store.reader import RolloutStore, StoredRollout
from tests.cluster.conftest import ENDS_S, ROOT, TwoNodes, metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SHORT = ("--max-steps", "3", "--eval-tasks", "8", "--save-every", "1")


def without_ray(out: Path, *words: str) -> Path:
    command = [sys.executable, "-m", "recipes.chase_grpo", "--sandbox", "unsafe", "--output-dir", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def rollouts(folder: Path) -> dict[tuple[str, int, str], StoredRollout]:
    with RolloutStore(folder) as store:
        return {(found.phase, found.step, found.rollout.rollout_id): found for found in store.find()}


def same_ids(one: StoredRollout, other: StoredRollout) -> bool:
    pairs = zip(one.rollout.segments, other.rollout.segments, strict=True)
    return all(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs)


def assert_same_rollouts(one: Path, other: Path) -> None:
    ours, theirs = rollouts(one), rollouts(other)
    assert ours.keys() == theirs.keys()
    assert [key for key, found in ours.items() if not same_ids(found, theirs[key])] == []
    assert [found.rollout.reward for found in ours.values()] == [theirs[key].rollout.reward for key in ours]


def test_two_trainers_and_a_worker_on_each_node_give_the_rollouts_of_one_process(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    run = two_nodes.recipe("chase_grpo", tmp_path / "ray", *SHORT, "--cluster.trainers", "2")
    summary = run.ended()
    assert "2 rollout workers" in run.said
    assert summary["rollouts"] == 3 * 64
    assert_same_rollouts(tmp_path / "ray", without_ray(tmp_path / "alone", *SHORT))


@pytest.mark.proof
def test_losing_a_worker_and_a_trainer_does_not_change_the_training_rollouts(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    words = ("--max-steps", "6", "--eval-tasks", "8", "--save-every", "1")
    run = two_nodes.recipe("chase_grpo", tmp_path / "ray", *words, "--cluster.trainers", "2")
    run.wait_for_step(1)
    assert two_nodes.kill("RolloutWorker")
    run.wait_for_step(3)
    assert two_nodes.kill("TrainerProcess")
    summary = run.ended()
    assert "has ended; replacing it" in run.said
    assert "continues from its last checkpoint" in run.said
    assert summary["steps"] == 6
    assert_same_rollouts(tmp_path / "ray", without_ray(tmp_path / "alone", *words))
    ours, theirs = run.metrics(), metrics(tmp_path / "alone")
    assert np.allclose([row["train/loss"] for row in ours], [row["train/loss"] for row in theirs], atol=1e-4)
    assert_counts_agree(ours)
    lost = {name: row for name, row in ours[-1].items() if name.startswith("cluster/")}
    assert summary["lost"] == {name.removeprefix("cluster/"): int(count) for name, count in lost.items()}
    assert [lost[f"cluster/{part}_lost"] for part in ("workers", "servers", "trainers")] == [1, 0, 1]
    assert [lost[f"cluster/{part}_replaced"] for part in ("workers", "servers", "trainers")] == [1, 0, 1]
    assert "lost: workers 1 (1 replaced)" in run.said
    assert sum(row["rollouts/dropped"] for row in ours) == lost["cluster/rollouts_lost"] > 0


def assert_counts_agree(rows: list[dict[str, float]]) -> None:
    """Assert that in each step, every rollout that was started or resumed has ended in exactly one way."""
    for row in rows:
        came = row["rollouts/started"] + row["rollouts/resumed"]
        assert came == sum(row[f"rollouts/{end}"] for end in ("finished", "dropped", "carried", "failed"))


def test_workers_lost_during_startup_are_replaced(two_nodes: TwoNodes, tmp_path: Path) -> None:
    words = ("--max-steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--eval-tasks", "0")
    run = two_nodes.recipe("chase_grpo", tmp_path / "ray", *words, "--cluster.workers", "2")
    while not two_nodes.kill("RolloutWorker.open"):
        assert run.process.poll() is None, run.said[-4000:]
    summary = run.ended()
    assert summary["lost"]["workers_lost"] == summary["lost"]["workers_replaced"] > 0
    assert_counts_agree(run.metrics())


@pytest.mark.proof
def test_a_run_survives_losing_ten_workers_two_nodes_two_trainers_and_its_driver(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    out = tmp_path / "ray"
    words = ("--max-steps", "30", "--save-every", "2", "--cluster.trainers", "2", "--cluster.restarts", "40")
    losses = ["RolloutWorker"] * 10 + ["node"] * 2 + ["TrainerProcess"] * 2 + ["driver"]
    random.Random(0).shuffle(losses)
    run = two_nodes.recipe("chase_grpo", out, *words)
    for step, lost in enumerate(losses, start=1):
        run.wait_for_step(min(2 * step - 1, 28))
        if lost == "node":
            two_nodes.lose_node()
        elif lost == "driver":
            run.kill()
            run = two_nodes.recipe("chase_grpo", out, *words)
        else:
            assert two_nodes.kill(lost), f"no {lost} ran"
    summary = run.ended()
    assert (summary["steps"], summary["eval_after"] >= 0.85) == (30, True), summary
    assert_counts_agree(run.metrics())
    assert run.metrics()[-1]["cluster/workers_lost"] >= 10
    assert len(run.metrics()) == 30
    assert two_nodes.gone("RolloutWorker")
    assert two_nodes.gone("TrainerProcess")
