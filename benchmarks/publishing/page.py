"""The page of all benchmarks, written from templates and from the kept results."""

import math
from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, FileSystemLoader, Undefined

from benchmarks.harness import Goal
from benchmarks.publishing.plans import FOLDER, PLANS, Plan
from benchmarks.publishing.results import Made, Result, read

PAGE = FOLDER.parents[1] / "docs" / "benchmarks.md"
MISSING = "no figure"


def page(plans: Iterable[Plan] = PLANS) -> str:
    """The Markdown of the page; a benchmark that was never kept has no figures in it."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "pages"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["n"] = shown
    sections = [environment.get_template("head.md").render()]
    sections += [_section(environment, plan) for plan in plans]
    return "\n".join(sections)


def _section(environment: Environment, plan: Plan) -> str:
    path = plan.kept()
    result = read(path) if path.exists() else None
    known: dict[str, Any] = {"f": {}, "r": {}, "goal": lambda name: goal_of(result, name), "made": ""}
    if result:
        report = result["report"]
        known |= {"f": report["figures"], "r": report["reference"], "made": conditions(result["made"])}
    return environment.get_template(f"{plan.name}.md").render(known)


def goal_of(result: Result | None, name: str) -> str:
    """A goal's value, the goal, and whether it was missed; KeyError for a goal that the report does not have."""
    if result is None:
        return MISSING
    goal: Goal = result["report"]["goals"][name]
    aim = f"goal {goal['goal']:,.10g}"
    if goal["value"] is None:
        return f"{MISSING} ({aim})"
    verdict = {True: "", False: ", missed", None: f", {MISSING}"}[goal["met"]]
    return f"{shown(goal['value'])} ({aim}{verdict})"


def shown(value: Any, digits: int = 3) -> str:
    """A number with that many significant digits; what was not measured says so."""
    if value is None or isinstance(value, Undefined):
        return MISSING
    if isinstance(value, str):
        return value
    if not math.isfinite(value) or abs(value - round(value)) < 1e-9:
        return f"{value:,.0f}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits - 1}e}" if decimals > 6 else f"{value:,.{max(decimals, 0)}f}"


def conditions(made: Made) -> str:
    """A sentence on when, where and with what a run was made."""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    load = "a load of {:g} before it and {:g} after it, ".format(*made["load"]) if made["load"] else ""
    return (
        f"These figures are of `{made['command']}` at commit {made['commit']} on {made['date']}: {made['processors']}, "
        f"{load}{versions}."
    )
