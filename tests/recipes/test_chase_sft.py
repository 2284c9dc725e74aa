"""The imitation recipe as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_careful_demonstrator_is_imitated_and_the_held_out_score_rises(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "recipes.chase_sft",
            "--sandbox",
            "unsafe",
            "--output-dir",
            tmp_path,
            "--eval-tasks",
            "64",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["loss_last"] < 0.5 * summary["loss_first"]
    assert summary["eval_after"] > summary["eval_before"] + 0.5
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
