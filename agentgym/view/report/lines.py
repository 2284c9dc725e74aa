"""The lines of a report: runs that differ only in their seed form one line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from agentgym.view.report.folders import KeptRun

OF_A_RUN = ("seed", "eval_seed", "output_dir", "resume", "save_every", "keep_checkpoints", "report_to")
"""Settings in which the runs of one line may differ: the seeds, and settings that change neither the tasks nor the
policy.
"""
NAMED = 3
"""Largest number of settings in a line's name."""


@dataclass(frozen=True, slots=True)
class Line:
    """Runs with the same settings and different seeds."""

    mark: str
    """Letter that identifies the line in plots and tables."""
    name: str
    runs: tuple[KeptRun, ...]

    @property
    def label(self) -> str:
        """The line's letter and its name."""
        return f"{self.mark}: {self.name}"

    @property
    def is_training(self) -> bool:
        """Whether its runs are training runs; otherwise they are evaluations."""
        return self.runs[0].is_training

    @property
    def seeds(self) -> list[Any]:
        """The seed of each run."""
        return [run.settings.get("seed") for run in self.runs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Summary statistics of a number over several seeds."""

    count: int
    mean: float
    deviation: float | None
    """Sample standard deviation (divided by n - 1); None for a single number."""
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A metric of a line over its steps: the mean, lowest and highest value over the seeds."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def spread(values: Sequence[float]) -> Spread | None:
    """Return the mean, deviation and range of the values, or None if there are no values."""
    if not values:
        return None
    deviation = stdev(values) if len(values) > 1 else None
    return Spread(count=len(values), mean=fmean(values), deviation=deviation, low=min(values), high=max(values))


def band(curves: Sequence[Mapping[int, float]]) -> Band:
    """Return the mean and the range over the seeds, at the steps that all of them have."""
    curves = [curve for curve in curves if curve]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    at = [[curve[step] for curve in curves] for step in steps]
    return Band(steps=steps, mean=[fmean(of) for of in at], low=[min(of) for of in at], high=[max(of) for of in at])


def lines_of(runs: Sequence[KeptRun]) -> list[Line]:
    """Return the lines in the order of their first runs, each named by the settings that distinguish it."""
    groups: dict[str, list[KeptRun]] = {}
    for run in runs:
        groups.setdefault(_key(run), []).append(run)
    chosen = [tuple(of) for of in groups.values()]
    names = [_name(of[0], [other[0] for other in chosen]) for of in chosen]
    return [Line(_mark(place), name, of) for place, (name, of) in enumerate(zip(names, chosen, strict=True))]


def differing(runs: Sequence[KeptRun]) -> list[str]:
    """Return the settings in which these runs differ, without those of `OF_A_RUN`."""
    names = sorted({name for run in runs for name in run.settings} - set(OF_A_RUN))
    return [name for name in names if len({_text(run.settings.get(name)) for run in runs}) > 1]


def _key(run: KeptRun) -> str:
    kept = {name: value for name, value in run.settings.items() if name not in OF_A_RUN}
    if not kept:  # Without settings, nothing shows that two runs are alike.
        return str(run.folder.resolve())
    return _text([run.is_training, kept, run.envs])


def _name(run: KeptRun, all_runs: Sequence[KeptRun]) -> str:
    """Name a line by the settings in which it differs from other lines of its kind (training runs or evaluations)."""
    alike = [other for other in all_runs if other.is_training == run.is_training]
    differ = [name for name in differing(alike) if name not in ("recipe", "env") and name in run.settings]
    settings = [f"{name} {_short(run.settings[name])}" for name in differ]
    more = [f"and {len(settings) - NAMED} more"] if len(settings) > NAMED else []
    return ", ".join([run.name, *settings[:NAMED], *more])


def _short(value: object) -> str:
    text = value if isinstance(value, str) else _text(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _mark(place: int) -> str:
    """Return the letters that identify a line: A, B, .. Z, AA, AB, .."""
    head, tail = divmod(place, 26)
    return (_mark(head - 1) if head else "") + chr(ord("A") + tail)
