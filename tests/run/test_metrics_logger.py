"""A run's metrics: one line per step, which every JSON reader accepts."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym.run.metrics_logger import METRICS, MetricsLogger
from agentgym.run.summary import Report, account
from tests.files.limits import files_up_to


def test_a_non_finite_metric_is_null_in_the_file_and_counted(tmp_path: Path) -> None:
    def refuse(constant: str) -> Any:
        pytest.fail(f"{constant} is not JSON")

    with MetricsLogger(tmp_path, steps=2) as log:
        log(0, {"reward": 1.0, "train/loss": float("nan"), "train/kl": float("inf")})
        log(1, {"reward": 1.0, "train/loss": 0.5})
    first, second = (
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert first == {"step": 0, "reward": 1.0, "train/loss": None, "train/kl": None, "metrics_not_finite": 2}
    assert second == {"step": 1, "reward": 1.0, "train/loss": 0.5}


def test_the_line_of_a_step_has_its_token_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLogger(tmp_path, steps=1) as log:
        log(0, {"reward": 0.5, "throughput/sampled_tokens_per_s": 1234.5})
    assert capsys.readouterr().err.endswith(" left, 1,234 tokens/s\n")


def test_the_line_of_a_step_says_how_many_turns_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"reward": 0.5, "rollouts/finished": 64.0, "rollout/turns": 1.25}
    with MetricsLogger(tmp_path, steps=2) as log:
        log(0, metrics)
        log(1, {**metrics, "rollout/cut_turns": 0.5})
    first, second = capsys.readouterr().err.splitlines()
    assert ", 0 of 80 turns cut  " in first
    assert ", 32 of 80 turns cut  " in second


def test_a_long_batch_reports_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetricsLogger(tmp_path, steps=2, rollouts=4) as log:
        log.rollout_ended()
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("agentgym.run.metrics_logger.QUIET_S", 0.0)
        log.rollout_ended()
        assert capsys.readouterr().err.startswith("rollouts 2 of 4  ")
        log(0, {"reward": 0.5})
        log.rollout_ended()
        assert capsys.readouterr().err.splitlines()[-1].startswith("rollouts 1 of 4  ")


def test_a_terminal_has_a_progress_bar_with_the_batchs_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich reads this variable to force terminal output
    monkeypatch.setenv("COLUMNS", "120")
    with MetricsLogger(tmp_path, steps=2, rollouts=4) as log:
        log.rollout_ended()
    assert "rollouts 1 of 4" in capsys.readouterr().err


def evaluated(reward: float) -> dict[str, float]:
    return {"eval/reward": reward, "eval/rollouts": 4.0, "eval/failed": 0.0}


def test_a_resumed_run_reports_held_out_scores_from_its_first_step_on(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, steps=2) as log:
        log.held_out(0, evaluated(0.125))
        for step in range(2):
            log(step, {"reward": 0.25, "train/optimizer_steps": 1})
        log.held_out(2, evaluated(0.25))
        log.held_out(3, evaluated(0.99))  # of a step that is not in the checkpoint
    with pytest.warns(UserWarning, match="2 of the 3 finished steps"), MetricsLogger(tmp_path, steps=4, done=3) as log:
        pass
    assert log.held_out_rewards == {0: 0.125, 2: 0.25}
    log.held_out_rewards[4] = 0.5
    assert "held-out reward 0.12 at the start, 0.50 at the end" in "\n".join(account(log.rows, log.held_out_rewards))


def test_a_resumed_run_knows_the_tool_calls_and_reward_spread_of_earlier_steps() -> None:
    rows = [
        {"reward": 0.5, "reward/std": 0.5, "tools/look/calls": 4.0, "tools/look/errors": 3.0, "tools/a/b/calls": 1.0},
        {"reward": 1.0, "reward/std": 0.0, "tools/look/calls": 2.0},
    ]
    report = Report(rows)
    assert (report.tools.calls, report.tools.errors) == ({"look": 6, "a/b": 1}, {"look": 3})
    assert not any("never varied" in said for said in report.warnings(rows))
    assert any(
        "never varied: every training rollout has a reward of 1." in said
        for said in Report(rows[1:]).warnings(rows[1:])
    )


@pytest.mark.usefixtures("capsys")  # keeps stderr out of a file, which could not grow either
def test_a_line_that_a_full_disk_cut_is_complete_when_the_file_is_written_again(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, steps=3) as log:
        log(0, {"reward": 0.5})
        with files_up_to((tmp_path / METRICS).stat().st_size + 5):
            log(1, {"reward": 1.0})
        (tmp_path / METRICS).unlink()
        assert log.follow_file() == f"{tmp_path / METRICS} was removed; writing it again."
        log(2, {"reward": 0.0})
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [0, 1, 2]


def test_a_line_after_an_unfinished_one_starts_on_a_new_line(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, steps=2) as log:
        log(0, {"reward": 0.5})
        (tmp_path / METRICS).unlink()
        (tmp_path / METRICS).write_text('{"step": 0, "reward": 0.5}')
        assert "was replaced by another file" in str(log.follow_file())
        assert log.follow_file() is None
        log(1, {"reward": 1.0})
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [0, 1]
