"""The results of benchmarks are stored with how they were measured, compared by ratios, and shown on pages."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Goal, at_least, at_most
from benchmarks.publishing.__main__ import main
from benchmarks.publishing.page import MISSING, OVERVIEW, conditions, goal_of, pages, shown, verdict_of
from benchmarks.publishing.plans import FOLDER, PLANS, Plan
from benchmarks.publishing.results import Result, comparable, falls, keep, read
from benchmarks.publishing.running import BenchmarkFailed, run

EMPTY = {"bench": "b", "figures": {}, "reference": {}, "goals": {}}


def names(kept: dict[str, Goal], found: dict[str, Goal]) -> list[str]:
    return [fall.goal for fall in falls(kept, found)]


STORED = [plan for plan in PLANS if plan.kept().exists()]


@cache
def page_of(plan: Plan) -> str:
    return pages()[OVERVIEW.with_suffix("") / f"{plan.name}.md"]


def test_the_pages_are_those_that_the_stored_results_give() -> None:
    written = pages()
    assert {path: path.read_text() for path in written} == written, "python -m benchmarks.publishing --page"
    assert {*OVERVIEW.with_suffix("").iterdir(), OVERVIEW} == set(written)


@pytest.mark.parametrize("plan", STORED, ids=lambda plan: plan.name)
def test_every_figure_of_a_stored_run_is_one_that_it_measured(plan: Plan) -> None:
    assert MISSING not in page_of(plan)


@pytest.mark.parametrize("plan", STORED, ids=lambda plan: plan.name)
def test_a_page_has_every_goal_of_its_benchmark(plan: Plan) -> None:
    result, text = read(plan.kept()), page_of(plan)
    assert [name for name in result["report"]["goals"] if goal_of(result, name) not in text] == []


def test_the_overview_has_a_row_with_figures_for_every_benchmark() -> None:
    text = pages()[OVERVIEW]
    assert MISSING not in text
    assert re.findall(r"^\| \[[^]]*\]\(benchmarks/(\w+)\.md\)", text, re.MULTILINE) == [plan.name for plan in PLANS]


def test_every_published_benchmark_has_a_program_and_a_page() -> None:
    texts = {path.stem for path in (FOLDER / "pages").glob("*.md")}
    assert texts == {plan.name for plan in PLANS} | {"overview"}
    for plan in PLANS:
        program = FOLDER.parent / plan.name
        assert program.with_suffix(".py").exists() or (program / "__main__.py").exists()


def test_every_stored_quick_goal_can_be_compared_in_ci() -> None:
    for plan in PLANS:
        if plan.quick is not None:
            goals = read(plan.kept(quick=True))["report"]["goals"]
            assert list(comparable(goals, goals)), plan.name


@pytest.mark.parametrize(
    ("goal", "kept", "found", "fell"),
    [
        (at_least, 4.0, 3.1, False),
        (at_least, 4.0, 2.9, True),
        (at_least, 1.0, 0.7, True),
        (at_least, 2.0, 1.4, True),
        (at_least, 2.0, 2.5, False),
        (at_most, 4.0, 4.9, False),
        (at_most, 4.0, 5.1, True),
        (at_most, 1.0, 1.4, True),
        (at_most, 2.0, 2.8, True),
        (at_most, 2.0, 0.1, False),
        (at_most, 0.0, 1.0, True),
    ],
)
def test_a_ratio_counts_as_fallen_if_it_is_worse_by_more_than_a_quarter(
    goal: Callable[[float, float], Goal], kept: float, found: float, fell: bool
) -> None:
    assert names({"g": goal(kept, 2.0)}, {"g": goal(found, 2.0)}) == (["g"] if fell else [])


def test_a_goal_that_names_another_kit_can_be_compared() -> None:
    goals = {"times skyrl's speed": at_least(4, 2)}
    assert list(comparable(goals, goals)) == ["times skyrl's speed"]


def test_goals_in_units_of_time_and_unmeasured_goals_are_not_compared() -> None:
    kept = {"pause, ms": at_most(1, 2), "share": at_most(None, 2), "lost": at_most(1, 2), "gone": at_most(1, 2)}
    found = {"pause, ms": at_most(9, 2), "share": at_most(9, 2), "lost": at_most(None, 2)}
    assert not list(comparable(kept, found))
    assert not falls(kept, found)


def test_a_result_records_how_it_was_made() -> None:
    program = f"print('table'); print({json.dumps(json.dumps(EMPTY))})"
    result = run([sys.executable, "-c", program, "/a/folder/of/mine"])
    assert result["report"] == EMPTY
    made = result["made"]
    assert made["command"].endswith(" mine")
    assert made["versions"]["python"] == sys.version.split()[0]
    assert made["command"].startswith("python -c")
    for word in (made["commit"], made["date"], made["processors"], "a load average of"):
        assert word in conditions(made)
    made["load"] = []
    assert "load" not in conditions(made)


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "", "print('a table, and no report')"])
def test_a_benchmark_that_ends_without_a_report_is_an_error(program: str) -> None:
    with pytest.raises(BenchmarkFailed, match="status"):
        run([sys.executable, "-c", program])


GOOD = {"value": 1.0, "goal": 2.0, "met": False}


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (5, "an object with bench, figures"),
        ([], "an object with bench, figures"),
        ({}, "bench: missing"),
        (EMPTY | {"goals": None}, "goals: got None"),
        (EMPTY | {"bench": 3}, "bench: got 3"),
        (EMPTY | {"goals": {"fast": 1}}, "goals: expected 'fast'"),
        (EMPTY | {"goals": {"good": GOOD, "fast": {"value": 1}}}, "goals: expected 'fast'"),
    ],
)
def test_a_report_with_a_missing_field_is_an_error(report: Any, field: str) -> None:
    with pytest.raises(BenchmarkFailed, match=field):
        run([sys.executable, "-c", f"print({json.dumps(json.dumps(report))})"])


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "no result is stored"), ("", "not a benchmark"), ('{"made":', "not a benchmark"), ("{}", "made: missing")],
)
def test_a_broken_or_missing_result_is_named_by_its_file(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    with pytest.raises(ValueError, match=rf"b\.json: .*{why}"):
        read(tmp_path / "b.json")


def test_a_value_that_is_not_a_number_counts_as_fallen() -> None:
    assert names({"g": at_least(4.0, 2.0)}, {"g": at_least(float("nan"), 2.0)}) == ["g"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["layuot"], "layuot: not a published benchmark"),
        (["layout", "--quick"], "--quick: layout has no quick form"),
        (["--page", "--compare"], "--page: "),
        (["layout", "http", "--", "-x"], "name exactly one"),
    ],
)
def test_ambiguous_or_empty_arguments_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["publishing", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err


STOPPED = """
import sys
from pathlib import Path
from benchmarks.publishing import __main__ as publishing
from benchmarks.publishing.plans import Plan

class Slow(Plan):
    def command(self, *, quick=False):
        program = "import os, time; print(os.getpid(), file=open(os.environ['HERE'], 'w'), flush=True); time.sleep(600)"
        return [sys.executable, "-c", program]

    def kept(self, *, quick=False):
        return Path("/nowhere/slow.json")

publishing.PLANS = (Slow(name="slow"),)
publishing.pages = None
publishing.main()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_ends_its_benchmark_and_stores_nothing(how: signal.Signals, tmp_path: Path) -> None:
    here = tmp_path / "pid"
    os.mkfifo(here)
    publishing = subprocess.Popen(
        [sys.executable, "-c", STOPPED], env=os.environ | {"HERE": str(here)}, stderr=subprocess.PIPE, text=True
    )
    benchmark = int(here.read_text())
    publishing.send_signal(how)
    _, said = publishing.communicate()
    assert publishing.returncode == 1
    assert said.splitlines()[-1].startswith("stopped: ")
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(benchmark, 0)


def test_a_result_is_read_as_it_was_stored(tmp_path: Path) -> None:
    result: Result = run([sys.executable, "-c", f"print({json.dumps(json.dumps(EMPTY))})"])
    keep(tmp_path / "new" / "b.json", result)
    assert read(tmp_path / "new" / "b.json") == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b.json"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3, "3"),
        (1.005, "1.00"),
        (0.0512, "0.0512"),
        (12.34, "12.3"),
        (18_123_456, "18,123,456"),
        (1234.56, "1,235"),
        (-0.81, "-0.810"),
        (float("inf"), "inf"),
        (1 - 1e-16, "1"),
        (6.217e-15, "0"),
        (2.5e-7, "2.50e-07"),
        (None, MISSING),
    ],
)
def test_numbers_have_three_significant_digits(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_a_summary_counts_goals_by_whether_they_were_met() -> None:
    assert verdict_of([]) == "no goals"
    assert verdict_of([at_least(3, 2), at_least(3, 2)]) == "2 met"
    assert verdict_of([at_least(3, 2), at_most(3, 2), at_most(None, 2)]) == "1 met, 1 missed, 1 not measured"


def test_a_goal_is_shown_with_whether_it_was_missed() -> None:
    made = run([sys.executable, "-c", f"print({json.dumps(json.dumps(EMPTY))})"])["made"]
    goals = {"met": at_least(3.0, 2.0), "missed": at_most(3.0, 2.0), "absent": at_most(None, 2.0)}
    result = Result(made=made, report={"bench": "b", "figures": {}, "reference": {}, "goals": goals})
    assert goal_of(result, "met") == "3 (goal 2)"
    assert goal_of(result, "missed") == "3 (goal 2, missed)"
    assert goal_of(result, "absent") == "no figure (goal 2)"
    with pytest.raises(KeyError):
        goal_of(result, "unknown")
