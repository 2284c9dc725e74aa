"""A teacher on real servers: launched by the first process under torchrun, or already running."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.engines.sglang.config import SGLangConfig
from tests.engines.sglang.server.conftest import MODEL, ROOT, real_config
from tests.run.test_resume import SETTINGS
from tests.torchrun import torchrun

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_recipe_on_two_processes_learns_from_a_server_launched_by_the_first(tmp_path: Path) -> None:
    """The teacher is the student's base, so they differ only by the two engines' rounding: almost nothing."""
    command = real_config().command
    flags = ["--model", str(MODEL), "--teacher", str(MODEL), "--teacher-engine", "sglang", "--train.device", "cpu"]
    flags += ["--teacher-engine.startup-s", "1200", "--teacher-engine.slots", "4", "--sandbox", "unsafe"]
    flags += [
        "--max-steps",
        "2",
        "--prompts-per-step",
        "2",
        "--group-size",
        "1",
        "--eval-tasks",
        "0",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [
            *(sys.executable, *torchrun(tmp_path / "logs"), "-m", "recipes.chase_distill"),
            *(*flags, f"--teacher-engine.command={command}"),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = steps_of(tmp_path / "run")
    assert abs(first["teacher/divergence"]) < 1e-3
    assert first["train/trained_tokens"] > 0
    assert second["time/teacher"] > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_a_running_server_can_teach_even_if_it_accepts_adapters(
    url: str, temperature: float, tmp_path: Path
) -> None:
    run = replace(
        SETTINGS,
        env="tests.run.test_resume:Terse",
        model=MODEL,
        teacher=MODEL,
        teacher_engine=SGLangConfig(urls=(url,), slots=4),
        train=replace(SETTINGS.train, temperature=temperature),
        max_steps=1,
        group_size=1,
        eval_tasks=0,
        output_dir=tmp_path,
    )
    await ag.train_policy(run)
    [row] = steps_of(tmp_path)
    assert abs(row["teacher/divergence"]) < 1e-3
    assert row["train/trained_tokens"] > 0
