"""A run's figures, a line a step, that every reader of JSON takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym.run.log import MetricsLogger


def test_a_figure_that_is_not_finite_is_null_in_the_file_and_counted(tmp_path: Path) -> None:
    def refuse(constant: str) -> Any:
        pytest.fail(f"{constant} is no JSON")

    with MetricsLogger(tmp_path, steps=2) as log:
        log(0, {"reward": 1.0, "train/loss": float("nan"), "train/kl": float("inf")})
        log(1, {"reward": 1.0, "train/loss": 0.5})
    first, second = (
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert first == {"step": 0, "reward": 1.0, "train/loss": None, "train/kl": None, "figures_not_finite": 2}
    assert second == {"step": 1, "reward": 1.0, "train/loss": 0.5}
