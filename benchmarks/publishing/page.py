"""The Markdown pages about the benchmarks, rendered from templates and from the stored results."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Undefined

from benchmarks.harness import Goal
from benchmarks.publishing.plans import FOLDER, PLANS, Plan
from benchmarks.publishing.results import Made, Result, read

OVERVIEW = FOLDER.parents[1] / "docs" / "benchmarks.md"
"""The page with a summary of all benchmarks; each benchmark has its own page in the folder next to it."""
MISSING = "no figure"


def pages() -> dict[Path, str]:
    """Return the text of every page by its path: the overview, then one page per benchmark.

    A benchmark without a stored result has no numbers on its page.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "pages"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["n"] = shown
    values = {plan.name: _values(plan) for plan in PLANS}
    texts = {OVERVIEW: environment.get_template("overview.md").render(values)}
    for name, known in values.items():
        texts[OVERVIEW.with_suffix("") / f"{name}.md"] = environment.get_template(f"{name}.md").render(known)
    return texts


def _values(plan: Plan) -> dict[str, Any]:
    """Return the values that a template can use: results, references, goals and conditions of the stored run."""
    path = plan.kept()
    result = read(path) if path.exists() else None
    known: dict[str, Any] = {"f": {}, "r": {}, "goal": lambda name: goal_of(result, name), "made": "", "verdict": ""}
    if result:
        report = result["report"]
        known |= {"f": report["figures"], "r": report["reference"], "made": conditions(result["made"])}
        known["verdict"] = verdict_of(report["goals"].values())
    return known


def goal_of(result: Result | None, name: str) -> str:
    """Return a goal's value, the goal, and whether it was missed.

    Raises:
        KeyError: If the report has no such goal.
    """
    if result is None:
        return MISSING
    goal: Goal = result["report"]["goals"][name]
    aim = f"goal {goal['goal']:,.10g}"
    if goal["value"] is None:
        return f"{MISSING} ({aim})"
    verdict = {True: "", False: ", missed", None: f", {MISSING}"}[goal["met"]]
    return f"{shown(goal['value'])} ({aim}{verdict})"


def verdict_of(goals: Iterable[Goal]) -> str:
    """Return how many goals were met, missed and not measured, such as `6 met, 2 missed`."""
    met = [goal["met"] for goal in goals]
    words = {"met": True, "missed": False, "not measured": None}
    counted = {word: sum(found is value for found in met) for word, value in words.items()}
    return ", ".join(f"{number} {word}" for word, number in counted.items() if number) or "no goals"


def shown(value: Any, digits: int = 3) -> str:
    """Return a number with that many significant digits, or MISSING if it was not measured."""
    if value is None or isinstance(value, Undefined):
        return MISSING
    if isinstance(value, str):
        return value
    if not math.isfinite(value) or abs(value - round(value)) < 1e-9:
        return f"{value:,.0f}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits - 1}e}" if decimals > 6 else f"{value:,.{max(decimals, 0)}f}"


def conditions(made: Made) -> str:
    """Return a paragraph on when, where and with what a run was made."""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    load = ", at a load average of {:g} before the run and {:g} after it".format(*made["load"]) if made["load"] else ""
    return (
        f"Measured with `{made['command']}` at commit {made['commit']} on {made['date']}, on "
        f"{made['processors']}{load}. Versions: {versions}."
    )
