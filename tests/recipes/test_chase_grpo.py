"""The recipe as a user runs it: as a command, to its summary line, with Ctrl-C, and on two processes."""

import json
import os
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
SMALL = ["--sandbox", "unsafe", "--engine.slots", "16", "--eval-tasks", "8"]


def command(*arguments: str) -> dict[str, Any]:
    """Return the arguments for `subprocess` that start the recipe; its temporary files are in TMPDIR."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {"args": [sys.executable, "-m", *arguments], "cwd": ROOT, "env": environment, "text": True}


def recipe(out: Path, *arguments: str) -> dict[str, Any]:
    """Run it to its end and return the summary on the last line of its stdout."""
    done = subprocess.run(
        **command("recipes.chase_grpo", *SMALL, "--output-dir", str(out), *arguments), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def rows_of(run: Path) -> list[dict[str, float]]:
    """Return the metrics of its steps, without the held-out scores."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/reward" not in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Run eight steps on one process."""
    out = tmp_path_factory.mktemp("alone")
    return recipe(out, "--max-steps", "8"), out


def test_the_reward_rises_and_the_held_out_score_agrees(alone: tuple[dict[str, Any], Path]) -> None:
    summary, _ = alone
    assert summary["recipe"] == "chase_grpo"
    assert summary["rollouts"] == 8 * 64
    assert summary["tool_calls"] > 300
    rewards = [row["reward"] for row in rows_of(alone[1])]
    assert rewards[-1] > rewards[0] + 0.3
    assert summary["eval_after"] > summary["eval_before"] + 0.3


def test_every_step_logs_the_gap_between_engine_and_trainer(alone: tuple[dict[str, Any], Path]) -> None:
    rows = rows_of(alone[1])
    assert len(rows) == 8
    assert all(row["train/logprob_gap"] < 1e-4 and row["sync/logprob_gap"] < 1e-4 for row in rows)
    assert all(row["rollouts/started"] == row["rollouts/finished"] + row["rollouts/failed"] for row in rows)


@pytest.mark.slow
@pytest.mark.proof
def test_in_bfloat16_on_both_sides_the_reward_rises_as_much(tmp_path: Path) -> None:
    both = ["--engine.dtype", "bfloat16", "--train.dtype", "bfloat16"]
    summary = recipe(tmp_path / "run", *both, "--eval-tasks", "128")
    assert summary["reward_last"] >= 0.9
    assert summary["eval_after"] >= 0.9
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 20
    arrived = [share for row in rows if (share := row.get("sync/arrived")) is not None]
    assert len(arrived) + rows[-1]["sync/unproven"] == 20
    assert len(arrived) >= 10
    assert max(row["sync/logprob_gap"] for row in rows) > 1e-3  # the weights are bfloat16


@pytest.mark.slow
def test_two_processes_train_the_same_adapter_as_one(alone: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    one = tmp_path / "one"
    recipe(one, "--max-steps", "2")
    _, *launch = torchrun(tmp_path / "logs")  # `command` adds the -m
    two = tmp_path / "two"
    done = subprocess.run(
        **command(*launch, "-m", "recipes.chase_grpo", *SMALL, "--max-steps", "2", "--output-dir", str(two)),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("{")]) == 1
    rows = [rows_of(run) for run in (one, two)]
    for mine, theirs in zip(*rows, strict=True):
        assert mine["reward"] == theirs["reward"]
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4, abs=1e-6)
    tensors = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two)]
    for name, tensor in tensors[0].items():
        # Adam turns gradient noise around 0 into a full step of either sign, so not every entry agrees.
        assert np.mean(np.abs(tensor - tensors[1][name]) > 1e-4) < 0.01, name


@pytest.mark.slow
def test_the_reward_rises_with_full_training(tmp_path: Path) -> None:
    summary = recipe(tmp_path, "--max-steps", "8", "--train.method", "full", "--train.lr", "5e-4")
    rewards = [row["reward"] for row in rows_of(tmp_path)]
    assert rewards[-1] > rewards[0] + 0.3
    assert summary["eval_after"] > summary["eval_before"] + 0.3
    assert {row["train/adapter_coverage"] for row in rows_of(tmp_path)} == {1.0}
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_or_file_and_prints_how_to_resume(tmp_path: Path) -> None:
    temporary, out = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    start = command("recipes.chase_grpo", *SMALL, "--output-dir", str(out))
    start["env"] |= {"TMPDIR": str(temporary)}
    with subprocess.Popen(**start, stderr=subprocess.PIPE, start_new_session=True) as running:
        assert running.stderr is not None
        assert any(line.startswith("step 0, 1/") for line in running.stderr)  # reads up to this line, or to the end
        assert any("sandbox/server" in text for text in processes(str(tmp_path)))
        os.killpg(running.pid, signal.SIGINT)
        error = running.stderr.read()
    assert running.returncode == 130
    assert f"--resume {out}" in error.splitlines()[-1]
    assert error.splitlines()[-1].startswith("Stopped by Ctrl-C: 1 finished steps are saved in ")
    assert "Traceback" not in error
    assert (out / "adapter" / "adapter_model.safetensors").exists()
    assert not processes(str(tmp_path))
    assert not list(temporary.glob("agentgym*"))


def processes(mark: str) -> list[str]:
    """Return command lines that contain this folder: those of the recipe and of its sandboxes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if mark in text:
            found.append(text.replace("\0", " "))
    return found
