"""`agentgym report`: one inert HTML file with its plots, for runs, evaluations, and a run that is still active."""

import base64
import errno
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli import main as cli
from agentgym.types.rollout import Rollout
from agentgym.view.report.folders import kept_runs
from agentgym.view.report.lines import lines_of
from agentgym.view.report.metrics import end_rows, score_rows, stop_rows
from tests.store.test_store import group, rollout, segment
from tests.view.report.runs import write_evaluation, write_run

pytest.importorskip("matplotlib", reason="needs the extra report")
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = (
    "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x00\N{RIGHT-TO-LEFT OVERRIDE}"
    "\ud800<!-- --> &lt; ]]> javascript:alert(3) $\\frac{1}{"
)
"""Text that a model might write to be executed, rendered, or to break the page."""


class Tags(HTMLParser):
    """Collects a page's tags with their attributes, its headings, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.headings: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1][0] == "h2" and data.strip():
            self.headings.append(data)


def reported(capsys: pytest.CaptureFixture[str], *args: object) -> Tags:
    """Run the command and return the page that it writes."""
    assert cli.main(["report", *map(str, args)]) == 0, capsys.readouterr().err
    path = Path(capsys.readouterr().out.partition(": ")[0])
    return Tags(path.read_text())


def failed(name: str) -> Rollout:
    return rollout(name, None)


def full(*_: object, **__: object) -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_page_has_its_parts_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        groups = [group(rollout("a/0", 0.5), failed("a/1")), group(rollout("b/0", -1.0))]
        played = {"rollouts/started": 3.0, "rollouts/failed": 1.0, "stop/answer": 1.0, "samples/groups": 2.0}
        write_run(tmp_path / f"{seed}", [0.1, 0.9], seed=seed, groups=groups, metrics=played)
    write_evaluation(tmp_path / "e", 0.75, groups=[group(rollout("a/0", 1.0))])
    page = reported(capsys, tmp_path)
    assert page.headings == [
        "Runs",
        "Curves",
        "Metrics at the end",
        "Evaluations",
        "Not trained on",
        "Failures",
        "Settings",
        "Settings of evaluations",
        "Best rollouts",
        "Worst rollouts",
    ]
    for part in ("A: ", "A, 2 times: EnvError: KeyError: 'x'", "Traceback ..", "2 rollouts failed.", "A, reward -1"):
        assert part.removeprefix("A: ") in page.text
    assert (tmp_path / "report/reward.png").read_bytes().startswith(PNG)


def test_the_page_needs_no_other_file_and_runs_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = reported(capsys, write_run(tmp_path / "a", [0.1, 0.9]))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "iframe", "link", "object", "form", "a", "base"})
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert sources
    assert len(sources) == sum(tag == "figure" for tag, _ in page.tags)
    for source in sources:
        assert source is not None
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(PNG)
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    [policy] = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")


def test_hostile_text_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wicked = segment([(2, 4), (5, 9)], length=12, text=HOSTILE)
    groups = [group(rollout("a/0", 0.5, segments=(wicked,)))]
    plain = write_run(tmp_path / "a", [0.1], groups=groups, metrics={"stop/answer": 1.0})
    tame = {tag for tag, _ in reported(capsys, plain, "--output-dir", tmp_path / "tame").tags}
    name = HOSTILE.replace("\ud800", "").replace("\x00", "")
    wild = write_run(tmp_path / "b", [0.1], seed=1, groups=groups, recipe=name, metrics={f"stop/{name}": 1.0})
    page = reported(capsys, plain, wild, "--output-dir", tmp_path / "wild")
    assert {tag for tag, _ in page.tags} == tame
    assert "<script>alert(1)</script>" in page.text
    assert r"\x1b[31mred\x00\u202e\ud800" in page.text
    raw = (tmp_path / "wild/report.html").read_bytes().decode()
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", raw)


def test_an_unfinished_run_is_reported_up_to_its_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", [0.1, 0.2], ended=False, groups=[group(rollout("a/0", 0.5))])
    path = folder / "settings.json"
    path.write_text(path.read_text().replace('"max_steps": 2', '"max_steps": 20'))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    page = reported(capsys, folder)
    assert "not ended: 2 of 20 steps" in page.text


def test_a_run_without_a_finished_step_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", [0.1], ended=False)
    (folder / "metrics.jsonl").write_text("")
    page = reported(capsys, folder)
    assert "not ended" in page.text
    assert "No rollout failed." in page.text


def test_runs_of_many_steps_and_of_one_step_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", [step / 40 for step in range(40)])
    write_run(tmp_path / "b", [0.5], seed=1, lr=1e-3)
    reported(capsys, tmp_path)
    assert (tmp_path / "report/reward.png").read_bytes().startswith(PNG)


def test_only_differing_settings_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", [0.1], lr=2e-3)
    write_run(tmp_path / "b", [0.1], lr=1e-3)
    reported(capsys, tmp_path)
    page = (tmp_path / "report/report.html").read_text()
    marked = re.findall(r'<tr class="differs"><th scope="row">(.*?) ≠</th><td>(.*?)</td><td>(.*?)</td>', page)
    assert marked == [("lr", "0.002", "0.001")]
    assert '<tr><th scope="row">env</th><td>envs.chase.env:Chase</td></tr>' in page


def test_the_reported_metrics_are_those_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", [0.0, 0.5], seed=0, held_out=[(0, 0.25), (2, 0.75)])
    write_run(tmp_path / "b", [0.0, 1.5], seed=1, held_out=[(0, 0.25), (2, 0.25)])
    page = reported(capsys, tmp_path)
    assert "0.500 ± 0.354 (0.250 to 0.750)" in page.text


def test_best_and_worst_rollouts_are_chosen_from_all_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, reward in enumerate((0.25, 0.75, 0.5)):
        write_run(tmp_path / f"{seed}", [0.1], seed=seed, groups=[group(rollout("a/0", reward))])
    page = reported(capsys, tmp_path, "--transcripts", 1)
    assert re.findall(r"A, reward (\S+):", page.text) == ["0.75", "0.25"]
    assert "Best" not in reported(capsys, tmp_path, "--transcripts", 0).text


def test_a_report_can_be_written_again_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", [0.1], held_out=[(0, 0.5)])
    reported(capsys, folder)
    assert (folder / "report/eval-reward.png").exists()
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    reported(capsys, folder)
    assert not (folder / "report/eval-reward.png").exists()


def test_a_report_that_failed_on_a_full_disk_can_be_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2])
    with monkeypatch.context() as patch:
        patch.setattr("agentgym.view.report.page.page", full)
        assert cli.main(["report", str(run)]) == 1
    assert "report: [Errno 28] No space left on device; free space" in capsys.readouterr().err
    reported(capsys, run)


def test_a_report_whose_page_did_not_fit_on_the_disk_leaves_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2])
    reported(capsys, run)
    before = {path.name: path.read_bytes() for path in (run / "report").iterdir()}
    (run / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    monkeypatch.setattr(Path, "replace", full)
    assert cli.main(["report", str(run)]) == 1
    assert {path.name: path.read_bytes() for path in (run / "report").iterdir()} == before


def test_a_report_that_was_killed_can_be_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2])
    (run / "report").mkdir()
    (run / "report/.report.html-ab12cd34").touch()
    reported(capsys, run)


def test_two_reports_on_a_folder_at_once_are_both_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_charts = pytest.importorskip("agentgym.view.report.plots").draw_charts
    run = write_run(tmp_path / "run", [0.1, 0.2])
    other: list[Tags] = []

    def drawn(*given: Any) -> Any:
        monkeypatch.setattr("agentgym.view.report.page.draw_charts", draw_charts)
        charts = draw_charts(*given)
        other.append(reported(capsys, run))
        return charts

    monkeypatch.setattr("agentgym.view.report.page.draw_charts", drawn)
    assert reported(capsys, run).text == other[0].text
    assert "Curves" in other[0].headings
    assert sorted(path.name for path in (run / "report").iterdir()) == ["report.html", "reward.png"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "runs: there is no folder nowhere; name the folder of a run, such as runs/RECIPE/TIME"),
        (["empty"], "runs: neither empty nor a folder in it has metrics.jsonl or rollouts.sqlite; name the"),
        (
            ["run", "--output-dir", "full"],
            "--output-dir: full has 'thesis.tex' but no report.html; name a new folder, or the folder of",
        ),
        (
            ["run", "--output-dir", "full/thesis.tex"],
            "--output-dir: full/thesis.tex cannot be created (File exists); name another",
        ),
        (["run", "--transcripts", "-1"], "--transcripts: must not be negative, got -1"),
        ([], "runs: name the folder of a run"),
        (["broken"], "runs: "),
    ],
)
def test_errors_of_report_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), [0.1])
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/thesis.tex").touch()
    write_run(Path("broken"), [0.1])
    Path("broken/rollouts.sqlite").write_bytes(b"no database" * 100)
    assert cli.main(["report", *words]) in (1, 2)
    heard = capsys.readouterr().err
    assert heard.startswith(f"agentgym: {said}") or f": {said}" in heard
    assert heard.count("\n") == 1


@pytest.mark.parametrize("name", ["report.html", "reward.png", "another.png"])
def test_a_folder_in_place_of_a_report_file_gives_an_error_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = write_run(tmp_path / "run", [0.1]) / "report" / name
    way.mkdir(parents=True)
    (way.parent / "old.png").touch()
    (way.parent / "report.html").touch() if name != "report.html" else (way / "mine").touch()
    assert cli.main(["report", str(tmp_path / "run")]) == 1
    assert (
        capsys.readouterr().err
        == f"agentgym: --output-dir: {way} is a folder, but the report needs to write a file there; remove it\n"
    )
    assert (way.parent / "old.png").exists()


def test_a_name_that_looks_like_a_matplotlib_formula_is_drawn_literally(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", [0.1], recipe="_$\\frac{1$ \N{SNOWMAN}")
    write_run(tmp_path / "b", [0.1], recipe=r"$\nonsense{$")
    reported(capsys, tmp_path)
    assert (tmp_path / "report/reward.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 10**400, 1.7e308])
def test_non_finite_metrics_are_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float) -> None:
    for seed in (0, 1):
        write_run(
            tmp_path / f"{seed}", [value, 0.5, -value], seed=seed, held_out=[(0, value)], metrics={"time/step": value}
        )
        write_evaluation(tmp_path / f"e{seed}", 0.5, seed=seed)
        (tmp_path / f"e{seed}" / "summary.json").write_text(
            json.dumps({"reward": value, "pass_at": {"1": value, "x": 1}})
        )
    page = reported(capsys, tmp_path)
    assert "Metrics at the end" in page.headings


@pytest.mark.parametrize("steps", [1, 2, 20, 300])
def test_a_curve_has_ticks_only_at_whole_steps(steps: int) -> None:
    figure, plots = pytest.importorskip("matplotlib.figure"), pytest.importorskip("agentgym.view.report.plots")
    axes = figure.Figure().add_subplot()
    axes.plot(range(1, steps + 1), [0.5] * steps)
    plots.mark_whole_steps(axes)
    ticks = axes.get_xticks()
    assert len(ticks)
    assert all(float(tick).is_integer() for tick in ticks)


@pytest.mark.parametrize("seeds", [1, 3])
def test_several_seeds_have_a_band_and_thin_lines_and_one_seed_has_neither(seeds: int) -> None:
    figure, plots = pytest.importorskip("matplotlib.figure"), pytest.importorskip("agentgym.view.report.plots")
    axes = figure.Figure().add_subplot()
    plots.add_curve(axes, plots.Curve("A", [{0: 0.1 * seed, 1: 0.5} for seed in range(seeds)]), "#000000")
    assert (len(axes.lines), len(axes.collections)) == ((1, 0) if seeds == 1 else (4, 1))


@pytest.mark.parametrize("seeds", [1, 2])
def test_captions_mention_seeds_only_if_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seeds: int
) -> None:
    for seed in range(seeds):
        write_run(tmp_path / f"{seed}", [0.1, 0.9], seed=seed)
    assert ("thin lines are seeds" in reported(capsys, tmp_path).text) == (seeds > 1)


def test_a_long_curve_is_drawn_with_few_points_including_its_peaks() -> None:
    values = [float(step % 7) for step in range(50_000)]
    values[12_345], values[40_000] = 99.0, -99.0
    plots = pytest.importorskip("agentgym.view.report.plots")
    steps, drawn = plots.thinned(range(50_000), values)
    assert len(steps) <= 2 * plots.PARTS
    assert {(12_345, 99.0), (40_000, -99.0), (0, 0.0)} <= set(zip(steps, drawn, strict=True))
    assert steps == sorted(steps)
    assert plots.thinned([1, 3], [0.5, 0.25], [1.0, 2.0]) == [[1, 3], [0.5, 0.25], [1.0, 2.0]]
    assert len(plots.thinned(range(10**5), values * 2, values * 2)[0]) <= 4 * plots.PARTS


def test_a_metric_that_is_always_zero_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", [0.1, 0.9], metrics={"rollouts/failed": 0.0, "train/entropy": 0.5})
    reported(capsys, tmp_path)
    assert {path.name for path in (tmp_path / "report").glob("*.png")} == {"reward.png", "train-entropy.png"}


def test_branches_and_the_critic_are_drawn_if_there_are_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"rollout/branch_tokens": 9.0, "train/explained_variance": -0.5, "train/value_loss": 0.1}
    write_run(tmp_path / "a", [0.1, 0.9], metrics=metrics)
    reported(capsys, tmp_path)
    drawn = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert drawn == {"reward.png", *(f"{name.replace('/', '-')}.png" for name in metrics)}


def test_evaluations_are_drawn_however_many_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(5):
        write_evaluation(tmp_path / f"{seed}", 0.1 * seed, seed=seed)
    reported(capsys, tmp_path)
    assert (tmp_path / "report/evaluations.png").read_bytes().startswith(PNG)


def test_folders_without_a_run_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", [0.1])
    (tmp_path / "notes").mkdir()
    (tmp_path / "metrics.jsonl.txt").write_text("")
    assert "Report on 1 run" in reported(capsys, tmp_path).text


def test_the_final_metrics_are_those_of_the_log(tmp_path: Path) -> None:
    held_out = [(0, 0.125), (2, 0.75), (4, 0.5)]
    write_run(tmp_path / "a", [0.25] * 5 + [0.5] * 5, held_out=held_out, metrics={"rollouts/started": 8.0})
    (heads, row) = end_rows(lines_of(kept_runs([tmp_path])))
    found = dict(zip(heads, row, strict=True))
    assert found | {"": "A", "runs": "1"} == {
        "": "A",
        "runs": "1",
        "steps": "10",
        "reward, first 5 steps": "0.250",
        "reward, last 5 steps": "0.500",
        "held-out, before": "0.125",
        "held-out, last": "0.500",
        "held-out, best": "0.750",
        "rollouts": "80",
        "trained tokens": "0",
        "CPU seconds": "12.500",
    }


def test_stop_reasons_are_shares_of_all_scored_rollouts(tmp_path: Path) -> None:
    """Steps with 90, 10 and 0 such rollouts, of which 9, 10 and 0 ended in an answer."""
    folder = write_run(tmp_path / "a", [0.1], metrics={"rollouts/finished": 90, "stop/answer": 0.1})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rollouts/finished": 10, "stop/answer": 1.0}\n')
        file.write('{"step": 2, "rollouts/finished": 0}\n')
    assert stop_rows(lines_of(kept_runs([folder]))) == [["", "runs", "answer"], ["A", "1", "0.190"]]


def test_a_missing_share_of_a_step_counts_as_zero(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.1], metrics={"rollouts/finished": 8})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rollouts/finished": 8, "stop/answer": 0.5}\n')
    assert stop_rows(lines_of(kept_runs([folder]))) == [["", "runs", "answer"], ["A", "1", "0.250"]]


def test_a_report_that_is_written_again_replaces_the_previous_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", [0.1], metrics={"train/entropy": 0.5})
    reported(capsys, folder)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("train/entropy", "train/loss"))
    reported(capsys, folder)
    assert {path.name for path in (folder / "report").iterdir()} == {"report.html", "reward.png"}


def test_the_only_evaluation_of_a_training_run_is_not_shown_as_its_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], held_out=[(0, 0.25)])
    (heads, row) = end_rows(lines_of(kept_runs([tmp_path])))
    found = dict(zip(heads, row, strict=True))
    assert (found["held-out, before"], found["held-out, last"], found["held-out, best"]) == ("0.250", "", "")


def test_a_pass_at_key_of_thousands_of_digits_is_not_a_metric(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "one", 0.5)
    summary = json.loads((folder / "summary.json").read_text())
    summary["pass_at"] |= {"9" * 5000: 1.0, "²": 1.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert score_rows(lines_of(kept_runs([folder])))[0] == ["", "runs", "reward", "pass@1", "rollouts", "failed"]


def test_the_scores_of_evaluations_come_from_their_summaries(tmp_path: Path) -> None:
    for seed, reward in enumerate((0.25, 0.75)):
        write_evaluation(tmp_path / f"{seed}", reward, seed=seed)
    spread = "0.500 ± 0.354 (0.250 to 0.750)"
    assert score_rows(lines_of(kept_runs([tmp_path]))) == [
        ["", "runs", "reward", "pass@1", "rollouts", "failed"],
        ["A", "2", spread, spread, "8", "1"],
    ]
