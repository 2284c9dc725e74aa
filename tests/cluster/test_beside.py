"""Evaluations on separate workers while training continues: same results as evaluations that training waits for."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.cluster.on_ray import joined_cluster
from agentgym.run.evaluation import PREFIX
from agentgym.run.lost import Losses
from tests.cluster.conftest import Run, TwoNodes
from tests.cluster.test_runs import assert_same_rollouts, without_ray

WORDS = ("--max-steps", "5", "--eval-every", "2", "--eval-tasks", "8", "--save-every", "1", "--keep-checkpoints", "9")
BESIDE = ("--cluster.eval-workers", "1", "--cluster.workers", "1")


def held_out(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each evaluation between the first and the last step, by the number of steps before it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "eval/reward" in row and 0 < row["step"] < 5}


async def test_settings_that_rule_out_concurrent_evaluation_are_refused_by_name() -> None:
    run = ag.RunConfig(recipe="beside", env="nim", model="tiny", ray="auto", cluster=ag.ClusterConfig(eval_workers=1))
    with pytest.raises(ValueError, match=r"^cluster\.eval_workers: there are no evaluations between steps"):
        async with joined_cluster(run, Losses()):
            pass


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.proof
def test_concurrent_evaluations_give_the_same_results_as_blocking_ones(two_nodes: TwoNodes, tmp_path: Path) -> None:
    run = two_nodes.recipe("chase_grpo", tmp_path / "ray", *WORDS, *BESIDE)
    summary = run.ended()
    assert "held-out evaluation after 2 steps, during training" in run.said
    alone = without_ray(tmp_path / "alone", *WORDS)
    ours, theirs = held_out(tmp_path / "ray"), held_out(alone)
    assert ours == theirs
    assert list(ours) == [2, 4]
    assert_same_rollouts(tmp_path / "ray", alone)
    best = json.loads((tmp_path / "ray" / "best" / "evaluation.json").read_text())
    assert best == json.loads((alone / "best" / "evaluation.json").read_text())
    assert best["step"] == summary["best_step"]
    assert_same_adapter(tmp_path / "ray" / "best", alone / "best")
    assert list((tmp_path / "ray").glob(f"{PREFIX}*")) == []
    assert two_nodes.gone("RolloutWorker")


def assert_same_adapter(one: Path, other: Path) -> None:
    from safetensors.numpy import load_file

    ours, theirs = load_file(one / "adapter_model.safetensors"), load_file(other / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-4, err_msg=name)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.proof
async def test_full_training_also_supports_concurrent_evaluations(two_nodes: TwoNodes, tmp_path: Path) -> None:
    run = ag.RunConfig(
        recipe="whole",
        env="tests.cluster.eval_env:Slow",
        model="tiny",
        engine=ag.TransformersConfig(slots=8),
        train=ag.TrainConfig(method="full", lr=1e-3, device="cpu"),
        max_steps=2,
        prompts_per_step=4,
        group_size=4,
        eval_tasks=8,
        eval_every=1,
    )
    await ag.train_policy(replace(run, output_dir=tmp_path / "alone"))
    spread = replace(run, ray=two_nodes.address, cluster=ag.ClusterConfig(workers=1, eval_workers=1))
    await ag.train_policy(replace(spread, output_dir=tmp_path / "ray"))
    assert held_out(tmp_path / "ray") == held_out(tmp_path / "alone") != {}
    best = [json.loads((tmp_path / folder / "best" / "evaluation.json").read_text()) for folder in ("ray", "alone")]
    assert best[0] == best[1]
    from safetensors.numpy import load_file

    ours, theirs = (load_file(tmp_path / folder / "best" / "model.safetensors") for folder in ("ray", "alone"))
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-4, err_msg=name)


def wait_for(run: Run, folder: str) -> None:
    """Return when the run has saved the policy for an evaluation that it starts."""
    while not (run.out / folder).exists():
        assert run.process.poll() is None, run.said[-4000:]
        time.sleep(0.01)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.proof
def test_a_lost_evaluation_worker_is_replaced_and_lost_evaluations_are_reported(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    run = two_nodes.recipe("chase_grpo", tmp_path / "ray", *WORDS, *BESIDE, "--cluster.restarts", "1")
    run.wait_for_step(1)
    kill_last(two_nodes)  # replaced, so the evaluation after 2 steps is complete
    wait_for(run, f"{PREFIX}000004")
    kill_last(two_nodes)  # no more replacements are allowed
    summary = run.ended()
    assert "WARNING: The evaluation after 4 steps is missing: cluster.restarts: 2 " in run.said
    assert list(held_out(tmp_path / "ray")) == [2]
    assert summary["steps"] == 5
    assert summary["best_step"] in (2, 5)
    assert (summary["lost"]["eval_workers_lost"], summary["lost"]["eval_workers_replaced"]) == (2, 1)
    assert summary["lost"]["workers_lost"] == 0
    assert list((tmp_path / "ray").glob(f"{PREFIX}*")) == []


def kill_last(nodes: TwoNodes) -> None:
    """Kill the worker that was started last, which is the one that evaluates."""
    os.kill(nodes.actors("RolloutWorker")[-1], signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.slow
def test_a_resumed_driver_reports_which_evaluation_was_running(two_nodes: TwoNodes, tmp_path: Path) -> None:
    out = tmp_path / "ray"
    run = two_nodes.recipe("chase_grpo", out, *WORDS, *BESIDE)
    wait_for(run, f"{PREFIX}000002")
    run.kill()
    (out / f"{PREFIX}000001").mkdir()  # as if an evaluation of an earlier step had been running, too
    run = two_nodes.recipe("chase_grpo", out, *WORDS, *BESIDE)
    run.ended()
    assert "WARNING: The evaluation after 1 steps was running when the run stopped; its result is missing." in run.said
    assert list(held_out(out)) == [2, 4]  # that after 2 steps was begun again
