"""The tables of a report: the metrics at the end of each line, and what was not learned from."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from agentgym.view.report.folders import KeptRun, measured
from agentgym.view.report.lines import OF_A_RUN, Line, Spread, spread

Metric: TypeAlias = Callable[[KeptRun], float | None]
DIGITS = 18
"""The most digits of a number in the name of a metric; Python refuses to read thousands of them."""
LAST = 5
"""Steps over which the first and the last reward are taken."""


def end_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of the metrics at the end of the trainings, its heading first; empty without one."""
    return _table(ENDS, [line for line in lines if line.is_training])


def unlearned_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of what was played and not learned from, its heading first; empty without a training."""
    return _table(UNLEARNED, [line for line in lines if line.is_training])


def stop_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of how rollouts of trainings ended, its heading first; empty where nothing says it."""
    reasons = sorted({name for line in lines for run in line.runs for row in run.steps for name in row if _stop(name)})
    metrics = {name.removeprefix("stop/"): _share(name) for name in reasons}
    return _table(metrics, [line for line in lines if line.is_training]) if metrics else []


def score_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of the scores of evaluations, its heading first; empty without one."""
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
    """Return the mean with its deviation and range; the number alone where there is one, or where all are equal."""
    if found is None:
        return ""
    if found.deviation is None or found.low == found.high:
        return number(found.mean)
    return f"{number(found.mean)} ± {number(found.deviation)} ({number(found.low)} to {number(found.high)})"


def number(value: float) -> str:
    """Return a number with at most three digits behind the point, one where it is large, none where it is whole."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


def _total(metric: str) -> Metric:
    return lambda run: float(sum(run.curve(metric).values())) if run.steps else None


def _share(metric: str) -> Metric:
    """Return the share of a run's rollouts with a reward: a step counts by how many of them it has."""

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
    "held out before": lambda run: run.curve("eval/reward").get(0),
    "held out at last": _after,
    "held out at best": _best,
    "rollouts": _total("rollouts/started"),
    "trained tokens": _total("train/trained_tokens"),
    "CPU seconds": _in_summary("cpu_seconds"),
}
"""The metrics at the end of a training, by their heading."""
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
"""What was played and not learned from, by its heading."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting: its name, its value in each line, and whether the lines differ in it."""

    name: str
    values: tuple[str, ...]
    differs: bool


def setting_rows(lines: Sequence[Line]) -> list[SettingRow]:
    """Return every setting of the lines, the files of their envs and their versions; those that differ first."""
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
