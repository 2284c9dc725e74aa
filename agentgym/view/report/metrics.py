"""The tables of a report: the final metrics of each line, and the rollouts that were not trained on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from agentgym.view.report.folders import KeptRun, measured
from agentgym.view.report.lines import OF_A_RUN, Line, Spread, spread

Metric: TypeAlias = Callable[[KeptRun], float | None]
DIGITS = 18
"""Largest number of digits of a k of pass@k. Python refuses to parse integers with thousands of digits."""
LAST = 5
"""Number of steps over which the first and the last reward are averaged."""


def end_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of the training runs' final metrics with its header row, or [] if there are none."""
    return _table(ENDS, [line for line in lines if line.is_training])


def unlearned_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of untrained rollouts and tokens with its header row, or [] if there are no training runs."""
    return _table(UNLEARNED, [line for line in lines if line.is_training])


def stop_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of the training runs' stop reasons with its header row, or [] if no metric has their shares."""
    reasons = sorted({name for line in lines for run in line.runs for row in run.steps for name in row if _stop(name)})
    metrics = {name.removeprefix("stop/"): _share(name) for name in reasons}
    return _table(metrics, [line for line in lines if line.is_training]) if metrics else []


def score_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of the evaluations' scores with its header row, or [] if there are none."""
    rollouts = [line for line in lines if not line.is_training]
    ks = sorted({name for line in rollouts for run in line.runs for name in _passes(run)}, key=int)
    metrics: dict[str, Metric] = {"reward": _in_summary("reward")}
    metrics |= {f"pass@{k}": _pass_at(k) for k in ks}
    metrics |= {"rollouts": _in_summary("rollouts"), "failed": _in_summary("failed")}
    return _table(metrics, rollouts)


def _table(metrics: dict[str, Metric], lines: Sequence[Line]) -> list[list[str]]:
    if not lines:
        return []
    rows = [["", "runs", *metrics]]
    for line in lines:
        of_runs = [[value for run in line.runs if (value := metric(run)) is not None] for metric in metrics.values()]
        rows.append([line.mark, str(len(line.runs)), *(shown(spread(values)) for values in of_runs)])
    return rows


def shown(found: Spread | None) -> str:
    """Return the mean with its deviation and range as text.

    If there is only one number, or if all are equal, only that number is returned.
    """
    if found is None:
        return ""
    if found.deviation is None or found.low == found.high:
        return number(found.mean)
    return f"{number(found.mean)} ± {number(found.deviation)} ({number(found.low)} to {number(found.high)})"


def number(value: float) -> str:
    """Format a number: an integer without decimals, 100 or more (in absolute value) with one, others with three."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


def _total(metric: str) -> Metric:
    return lambda run: float(sum(run.curve(metric).values())) if run.steps else None


def _share(metric: str) -> Metric:
    """Return the metric that averages a share over a run's steps, each weighted by its number of scored rollouts."""

    def of(run: KeptRun) -> float | None:
        weights = run.curve("rollouts/finished")
        if not run.finished:
            return None
        return sum(share * weights.get(step, 0.0) for step, share in run.curve(metric).items()) / run.finished

    return of


def _in_summary(name: str) -> Metric:
    return lambda run: measured(run.summary.get(name))


def _pass_at(k: str) -> Metric:
    return lambda run: measured(_passes(run).get(k))


def _passes(run: KeptRun) -> dict[str, Any]:
    found = run.summary.get("pass_at")
    return {k: of for k, of in found.items() if k.isdecimal() and len(k) <= DIGITS} if isinstance(found, dict) else {}


def _stop(name: str) -> bool:
    return name.startswith("stop/")


def _first(run: KeptRun) -> float | None:
    found = list(run.curve("reward").values())[:LAST]
    return fmean(found) if found else None


def _last(run: KeptRun) -> float | None:
    found = list(run.curve("reward").values())[-LAST:]
    return fmean(found) if found else None


def _after(run: KeptRun) -> float | None:
    found = run.curve("eval/reward")
    return found[max(found)] if found and max(found) else None


def _best(run: KeptRun) -> float | None:
    found = run.curve("eval/reward")
    return max(found.values()) if len(found) > 1 else None


ENDS: dict[str, Metric] = {
    "steps": lambda run: float(len(run.steps)),
    f"reward, first {LAST} steps": _first,
    f"reward, last {LAST} steps": _last,
    "held-out, before": lambda run: run.curve("eval/reward").get(0),
    "held-out, last": _after,
    "held-out, best": _best,
    "rollouts": _total("rollouts/started"),
    "trained tokens": _total("train/trained_tokens"),
    "CPU seconds": _in_summary("cpu_seconds"),
}
"""The final metrics of a training run, by column header."""
UNLEARNED: dict[str, Metric] = {
    "rollouts": _total("rollouts/started"),
    "failed": _total("rollouts/failed"),
    "dropped": _total("rollouts/dropped"),
    "groups": _total("samples/groups"),
    "groups without a signal": _total("samples/groups_without_signal"),
    "tokens left out of training": _total("samples/untrained_tokens"),
    "steps without a finite gradient": _total("train/skipped_steps"),
    "steps without a token": _total("train/untrained_steps"),
}
"""Counts of rollouts, groups, tokens and steps that were not trained on, by column header."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting: its name, its value in each line, and whether the lines differ in it."""

    name: str
    values: tuple[str, ...]
    differs: bool


def setting_rows(lines: Sequence[Line]) -> list[SettingRow]:
    """Return every setting of the lines, with env file hashes and package versions, those that differ first."""
    kept = [_settings(line) for line in lines]
    names = sorted({name for settings in kept for name in settings})
    values = [tuple(settings.get(name, "") for settings in kept) for name in names]
    rows = [SettingRow(name, of, len(set(of)) > 1) for name, of in zip(names, values, strict=True)]
    return sorted(rows, key=lambda row: not row.differs)


def _settings(line: Line) -> dict[str, str]:
    first = line.runs[0]
    found = {name: _text(value) for name, value in first.settings.items() if name not in OF_A_RUN}
    found["seed"] = ", ".join(_text(seed) for seed in line.seeds)
    found |= {f"files of {name}": sha[:12] for name, sha in first.envs.items()}
    packages = sorted({name for run in line.runs for name in run.versions})
    for name in packages:
        versions = dict.fromkeys(_text(run.versions.get(name)) for run in line.runs)
        found[f"version of {name}"] = ", ".join(versions)
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
