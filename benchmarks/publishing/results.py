"""The stored result of a benchmark, with where and when it was measured, and the comparison of two of them."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_origin, get_type_hints, is_typeddict

from benchmarks.harness import Goal

SHARE = 0.75
"""A ratio has fallen if it is below this share of the stored one."""
TIMED = re.compile(r"(?<![a-z'])(ns|us|ms|s|seconds)(?![a-z])")
"""A goal with a unit of time in its name depends on the machine."""


class Report(TypedDict):
    """The report that a benchmark prints on its last line."""

    bench: str
    figures: dict[str, float]
    reference: dict[str, float | str]
    goals: dict[str, Goal]


class Made(TypedDict):
    """Where, when and how a report was made."""

    command: str
    commit: str
    date: str
    seconds: float
    processors: str
    load: list[float]
    """The load average of one minute, before and after the run; empty if it was not read."""
    versions: dict[str, str]


class Result(TypedDict):
    """A report and how it was made."""

    made: Made
    report: Report


class Fall(NamedTuple):
    """A goal whose value is worse by more than a quarter."""

    goal: str
    kept: float
    found: float


def read(path: Path) -> Result:
    """Return the stored result.

    Raises:
        ValueError: If the file doesn't exist or isn't a result; the message names it.
    """
    try:
        result: Result = json.loads(path.read_text())
        _require(result, Result)
        _require(result["made"], Made)
        _require(result["report"], Report)
    except FileNotFoundError:
        raise ValueError(f"{path}: no result is stored yet") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a benchmark result: {error}") from None
    return result


def report_of(printed: str) -> Report:
    """Return the report on the last line of a benchmark's output.

    Raises:
        ValueError: If that line isn't a report.
    """
    report: Report = json.loads(printed.rstrip().rpartition("\n")[2])
    _require(report, Report)
    return report


def _require(found: Any, kind: type) -> None:
    fields = get_type_hints(kind)
    if not isinstance(found, dict):
        raise ValueError(f"expected an object with {', '.join(fields)}")
    if missing := [name for name in fields if name not in found]:
        raise ValueError(f"{missing[0]}: missing")
    if wrong := [
        name for name, hint in fields.items() if not isinstance(found[name], get_origin(hint) or _plain(hint))
    ]:
        raise ValueError(f"{wrong[0]}: got {found[wrong[0]]!r:.80}")
    for name, goal in found.get("goals", {}).items():
        if not isinstance(goal, dict) or not goal.keys() >= Goal.__required_keys__:
            raise ValueError(f"goals: expected {name!r} to be an object with {', '.join(Goal.__annotations__)}")


def _plain(hint: Any) -> Any:
    return dict if is_typeddict(hint) else (int, float) if hint is float else hint


def keep(path: Path, result: Result) -> None:
    """Write a result atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    part.replace(path)


def comparable(kept: Mapping[str, Goal], found: Mapping[str, Goal]) -> Iterator[str]:
    """Yield the goals that don't depend on the machine and that both runs measured."""
    for name, goal in kept.items():
        other = found.get(name)
        if not TIMED.search(name) and goal["value"] is not None and other and other["value"] is not None:
            yield name


def falls(kept: Mapping[str, Goal], found: Mapping[str, Goal]) -> list[Fall]:
    """Return the comparable goals that are worse by more than a quarter.

    A goal doesn't say whether more is better. More is better if the value is above the goal and meets it, or below the
    goal and misses it.
    """
    worse = []
    for name in comparable(kept, found):
        before, now = kept[name]["value"], found[name]["value"]
        assert before is not None
        assert now is not None
        rises = more_is_better(kept[name]) if before != kept[name]["goal"] else more_is_better(found[name])
        if not (
            (now >= SHARE * before) if rises else (now <= before * (2 - SHARE))
        ):  # NaN is neither, and counts as fallen
            worse.append(Fall(name, before, now))
    return worse


def more_is_better(goal: Goal) -> bool:
    """Return whether a larger value meets the goal; a value equal to the goal doesn't tell, and counts as True."""
    value = goal["value"]
    assert value is not None
    return value == goal["goal"] or (value > goal["goal"]) == goal["met"]
