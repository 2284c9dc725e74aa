"""A recipe that is killed and resumed gives the same result as one that is never killed."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.torchrun import torchrun

ROOT = Path(__file__).parents[2]
# One rollout at a time, so that the engine computes every token in the same shapes, with the same float noise.
SMALL = [
    "--sandbox",
    "unsafe",
    "--engine.slots",
    "1",
    "--prompts-per-step",
    "2",
    "--group-size",
    "4",
    "--eval-tasks",
    "0",
]
CLOCKS = ("train/seconds", "rollout/seconds", "oversample/length_bias", "time/", "throughput/")
"""Prefixes of metrics that depend on wall time."""
PROOF = ("sync/arrived", "sync/unproven")
"""Metrics of the check after a sync, which starts over in each process."""


def start(*command: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def play(steps: int, *flags: str, until: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the recipe to its end, or kill it `until` seconds after training started."""
    script = ["-m", "recipes.chase_grpo"] if until is None else ["-m", "tests.recipes.killed_script", str(until)]
    return start(*script, *SMALL, "--max-steps", str(steps), *flags)


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith((*CLOCKS, *PROOF))} for row in rows]


def is_the_same(one: Path, other: Path) -> None:
    """Assert that every metric of every step and every weight is equal, bit for bit."""
    assert metrics(one) == metrics(other)
    adapters = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (one, other)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(np.array_equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())


def summary(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_on_one_and_vice_versa(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    pair = [*torchrun(tmp_path / "logs"), "-m", "recipes.chase_grpo", *SMALL]
    summary(play(2, "--output-dir", str(one)))
    summary(start(*pair, "--max-steps", "2", "--output-dir", str(two)))
    summary(start(*pair, "--max-steps", "4", "--resume", str(one)))
    summary(play(4, "--resume", str(two)))
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine["step"] == theirs["step"]
        assert mine["reward"] == theirs["reward"]
        assert ("train/loss" in mine) == ("train/loss" in theirs)
        if "train/loss" in mine:  # a batch whose groups have no signal has no loss
            assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3, abs=1e-5)
    assert len(metrics(one)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("killed", [4, pytest.param(20, marks=pytest.mark.proof)])
def test_kills_at_random_moments_change_no_metric_and_no_weight(killed: int, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    wanted = summary(play(30, "--save-every", "2", "--output-dir", str(whole)))
    dice = random.Random(5)
    kills = 0
    runs: list[Path] = []
    while kills < killed:
        run = tmp_path / f"run{len(runs)}"
        runs.append(run)
        finished = False
        while not finished:
            begun = list((run / "checkpoints").glob("step-*"))
            flags = ["--resume" if begun else "--output-dir", str(run), "--save-every", "2"]
            until = dice.uniform(0, 4) if kills < killed else None
            done = play(30, *flags, until=until)
            finished = done.returncode == 0
            kills += not finished
            assert finished or done.returncode == -signal.SIGKILL, done.stderr[-3000:]
            assert "is not used" not in done.stderr  # no checkpoint was half written
        is_the_same(run, whole)
        said = summary(done)
        assert {k: said[k] for k in ("rollouts", "steps", "reward_last")} == {
            k: wanted[k] for k in ("rollouts", "steps", "reward_last")
        }
