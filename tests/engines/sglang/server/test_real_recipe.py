"""`recipes.chase_grpo --engine sglang` as a user runs it: it launches a server, trains on it and ends it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.sglang.server.conftest import ROOT, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_the_recipe_launches_a_server_trains_on_it_and_ends_it(tmp_path: Path) -> None:
    environment = os.environ | {
        "AGENTGYM_SGLANG": real_config().command,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    words = [
        "--engine",
        "sglang",
        "--engine.startup-s",
        "1200",
        "--max-steps",
        "8",
        "--eval-tasks",
        "0",
        "--sandbox",
        "unsafe",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.chase_grpo", *words, "--output-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["rollouts"] == 8 * 64
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.3
    assert all(row["sync/logprob_gap"] < 1e-4 and row["train/logprob_gap"] < 1e-4 for row in rows)
    assert all(row["rollouts/failed"] == 0 for row in rows)
    assert not list(tmp_path.glob("agentgym-sglang-*"))
