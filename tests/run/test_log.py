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


def test_a_line_of_a_step_has_the_rate_of_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLogger(tmp_path, steps=1) as log:
        log(0, {"reward": 0.5, "throughput/sampled_tokens_per_s": 1234.5})
    assert capsys.readouterr().err.endswith(" left, 1,234 tokens/s\n")


def test_a_long_batch_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetricsLogger(tmp_path, steps=2, rollouts=4) as log:
        log.rollout_ended()
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("agentgym.run.log.QUIET_S", 0.0)
        log.rollout_ended()
        assert capsys.readouterr().err.startswith("rollouts 2 of 4  ")
        log(0, {"reward": 0.5})
        log.rollout_ended()
        assert capsys.readouterr().err.splitlines()[-1].startswith("rollouts 1 of 4  ")


def test_a_terminal_has_a_bar_with_the_rollouts_of_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what reads this for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with MetricsLogger(tmp_path, steps=2, rollouts=4) as log:
        log.rollout_ended()
    assert "rollouts 1 of 4" in capsys.readouterr().err
