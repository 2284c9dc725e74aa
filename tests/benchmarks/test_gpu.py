"""The GPU benchmark on a machine without one: its FLOP count, and a full dry run in tiny shapes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from agentgym.train import Trainer
from agentgym.types import Sample
from benchmarks import gpu
from benchmarks.gpu import DRY, REAL, flops, make_model, make_samples, sample

ROOT = Path(__file__).parents[2]


def test_the_work_of_one_row_equals_the_count_of_a_forward_pass(tmp_path: Path) -> None:
    """Twice the forward: the backward to the inputs costs the matrices' forward again, and twice that of attention."""
    make_model(tmp_path, DRY)
    [row] = make_samples(None, 0, DRY)[:1]
    row = replace(row, loss_mask=np.zeros(len(row.response_ids), np.bool_))  # no output layer
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.model(torch.ones(1, len(row), dtype=torch.long))
    forward = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in forward.items() if "attention" in str(op))
    matrices = sum(forward.values()) - attention
    pairs = len(row) * (len(row) + 1) / 2
    wanted = 2 * matrices + 12 * DRY.layers * DRY.heads * DRY.head_dim * pairs
    assert flops([row], DRY, shared=False) == pytest.approx(wanted)
    if attention:  # counted for every pair, including those that the mask hides
        assert attention == 4 * DRY.layers * DRY.heads * DRY.head_dim * len(row) ** 2


def test_a_shared_prompt_is_counted_once_in_a_tree() -> None:
    rows = make_samples(None, 0, DRY)[:8]
    assert len({row.group_id for row in rows}) == 1
    whole, shared = flops(rows, DRY, shared=False), flops(rows, DRY, shared=True)
    alone = sample(0, 0, rows[0].prompt_ids[:-1], 1, np.random.default_rng(0), DRY)  # as long as the prompt
    prompt = replace(alone, loss_mask=np.zeros(1, np.bool_))
    assert whole - shared == pytest.approx(7 * flops([prompt], DRY, shared=False))


def test_the_real_shape_has_as_many_parameters_as_its_name_claims() -> None:
    row = sample(0, 0, np.ones(1, np.int64), 1, np.random.default_rng(0), REAL)
    assert flops([row], REAL, shared=False) / 8 == pytest.approx(1.7e9, rel=0.1)  # two tokens, 4 for each weight


def test_a_case_that_fails_is_reported_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path, DRY)

    def timed(trainer: Trainer, rows: Sequence[Sample], *, on_gpu: bool) -> tuple[float, float]:
        if trainer.config.layout == "tree":
            raise torch.OutOfMemoryError("too large")
        if trainer.config.layout == "padded":
            raise RuntimeError("no such kernel")
        return 2.0, 0.0

    monkeypatch.setattr(gpu, "timed", timed)
    rows = make_samples(None, 0, DRY)[:8]
    found = gpu.speeds(tmp_path, rows, DRY, "cpu", None, checkpointing=(True,))
    assert found.keys() == {"packed_checkpointed_tokens_per_s", "packed_checkpointed_peak_mib"}
    assert found["packed_checkpointed_tokens_per_s"] == sum(map(len, rows)) / 2
    said = capsys.readouterr().err
    assert "out of memory: too large" in said
    assert "RuntimeError: no such kernel" in said


def test_a_goal_whose_layout_was_not_measured_does_not_count_as_missed() -> None:
    found = gpu.goals({"packed_sharded_checkpointed_mfu": 0.4, "packed_mfu": 0.2}, on_gpu=True)
    assert [goal["met"] for goal in found.values()] == [None, None, None, True]


@pytest.mark.slow
def test_the_dry_run_measures_every_layout_and_tree_agrees_with_padded_rows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "gpu"
    for name in ("padded", "packed", "tree", "padded_checkpointed", "packed_checkpointed", "tree_checkpointed"):
        assert said["figures"][f"{name}_tokens_per_s"] > 0
        assert said["figures"][f"{name}_peak_mib"] > 0
    assert all(goal["met"] for goal in said["goals"].values())
    assert not any("MFU" in name for name in said["goals"])  # a CPU has none
