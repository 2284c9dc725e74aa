"""The lines of a report: runs that differ only in their seed share a line, which shows the spread over seeds."""

from pathlib import Path

import pytest

from agentgym.errors import AgentGymError
from agentgym.files.foreign.opening import UnreadableFileError
from agentgym.view.report.folders import KeptRun, kept_runs, measured
from agentgym.view.report.lines import band, lines_of, spread
from tests.view.report.runs import write_evaluation, write_run


def test_runs_that_differ_only_in_their_seed_share_a_line(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path / f"a{seed}", [0.1, 0.2], seed=seed, output_dir=f"elsewhere-{seed}")
    write_run(tmp_path / "b", [0.1, 0.2], seed=0, lr=1e-3)
    found = lines_of(kept_runs([tmp_path]))
    assert [(line.mark, line.seeds) for line in found] == [("A", [0, 1, 2]), ("B", [0])]


def test_a_line_is_named_after_its_differing_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1], lr=2e-3)
    write_run(tmp_path / "b", [0.1], lr=1e-3, layout="tree")
    write_evaluation(tmp_path / "c", 0.5)
    labels = [line.label for line in lines_of(kept_runs([tmp_path]))]
    assert labels == ["A: chase, lr 0.002", "B: chase, layout tree, lr 0.001", "C: evaluation of Chase"]


def test_runs_of_envs_with_different_files_are_two_lines(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a", [0.1]), write_run(tmp_path / "b", [0.1], seed=1)
    path = other / "settings.json"
    path.write_text(path.read_text().replace("95b0e12255e6138c", "0000000000000000"))
    assert len(lines_of(kept_runs([one, other]))) == 2


def test_runs_without_settings_never_share_a_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (write_run(tmp_path / name, [0.1]) / "settings.json").unlink()
    assert len(lines_of(kept_runs([tmp_path]))) == 2


def test_the_spread_over_seeds_is_mean_deviation_and_range() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.low, found.high) == (3.0, 1.0, 6.0)
    assert found.deviation == pytest.approx(7**0.5)
    assert spread([]) is None
    alone = spread([4.0])
    assert alone is not None
    assert alone.deviation is None


def test_a_band_covers_the_steps_that_every_seed_has() -> None:
    found = band([{1: 0.0, 2: 0.5, 3: 1.0}, {1: 1.0, 2: 1.0}, {}])
    assert (found.steps, found.mean, found.low, found.high) == ([1, 2], [0.5, 0.75], [0.0, 0.5], [1.0, 1.0])


def test_a_curve_uses_the_logs_step_numbers_and_skips_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.25, 0.5], held_out=[(0, 0.1), (2, 0.9)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward": null}\n{"step": 3, "reward": 0.')
    run = KeptRun(folder)
    assert run.curve("reward") == {0: 0.25, 1: 0.5}
    assert run.curve("eval/reward") == {0: 0.1, 2: 0.9}


def test_a_step_that_was_repeated_after_a_resume_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.25, 0.5])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "reward": 0.75}\n')
    assert KeptRun(folder).curve("reward") == {0: 0.25, 1: 0.75}


def test_a_log_is_parsed_once_for_any_number_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []

    def counted(value: object) -> float | None:
        looked.append(value)
        return measured(value)

    monkeypatch.setattr("agentgym.view.report.folders.measured", counted)
    (run,) = kept_runs([write_run(tmp_path / "one", [0.5] * 100, metrics={"stop/done": 1.0})])
    for metric in [f"metric {number}" for number in range(1000)]:
        assert run.curve(metric) == {}
    assert run.curve("reward") == dict.fromkeys(range(100), 0.5)
    assert len(looked) == 400


def test_a_log_with_too_many_lines_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [0.5])
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward": 1}\n' * 100_000)
    assert kept_runs([folder])[0].curve("reward") == {0: 1}
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward": 1}\n' * 100_001)
    with pytest.raises(UnreadableFileError, match=r"metrics\.jsonl has 100,001 lines, but the limit is 100,000"):
        _ = kept_runs([folder])[0].steps


def test_a_folder_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.25])
    with pytest.raises(AgentGymError, match=r"^runs: .*a is named twice; name each run once$"):
        kept_runs([folder, tmp_path])


def test_labels_after_z_have_two_letters(tmp_path: Path) -> None:
    for number in range(54):
        write_run(tmp_path / f"{number:02}", [0.1], lr=number)
    marks = [line.mark for line in lines_of(kept_runs([tmp_path]))]
    assert (marks[0], marks[25:28], marks[51:]) == ("A", ["Z", "AA", "AB"], ["AZ", "BA", "BB"])
