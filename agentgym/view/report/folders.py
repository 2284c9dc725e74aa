"""What a report reads of a run's or an evaluation's folder; nothing is written there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agentgym.errors import AgentGymError
from agentgym.files.foreign.content import parsed
from agentgym.files.foreign.opening import UnreadableFileError, read_bytes
from agentgym.run.metrics_logger import HELD_OUT, METRICS
from agentgym.run.recorder import SUMMARY
from agentgym.store.run_settings import SETTINGS
from agentgym.store.schema import FILE

LONGEST = 1 << 20
"""The most bytes of a line of metrics.jsonl; runs write a few thousand."""
MOST_LINES = 100_000
"""The most lines of metrics.jsonl; those of a run fill the largest file that is read with fewer."""
LARGEST = 1e150
"""Size above which a metric is left out: squares and sums of larger ones overflow."""


@dataclass(frozen=True)
class KeptRun:
    """The folder of a run or of an evaluation, which may still be written to."""

    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name; of an evaluation, what it was begun with."""
        content = self._file
        kept = content.get("settings")
        if isinstance(kept, dict):
            return kept
        return _dotted({name: value for name, value in content.items() if name not in ("versions", "envs")})

    @cached_property
    def envs(self) -> dict[str, str]:
        """The hash of the files of each env, by its name."""
        found = self._file.get("envs")
        named = found if isinstance(found, dict) else {}
        return {name: str(of.get("sha256")) for name, of in named.items() if isinstance(of, dict)}

    @cached_property
    def versions(self) -> dict[str, Any]:
        """The versions that it was begun with, by package."""
        found = self._file.get("versions")
        return found if isinstance(found, dict) else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The metrics of its end; empty before that."""
        return read_json(self.folder / SUMMARY)

    @property
    def is_training(self) -> bool:
        """Whether it was trained; an evaluation was played alone."""
        return isinstance(self._file.get("settings"), dict) or (self.folder / METRICS).is_file()

    @property
    def has_rollouts(self) -> bool:
        """Whether its rollouts are there to be read."""
        return (self.folder / FILE).is_file()

    @property
    def name(self) -> str:
        """The recipe, or the env of an evaluation."""
        env = str(self.settings.get("env", "")).rpartition(":")[2]
        return str(self.settings.get("recipe") or (f"evaluation of {env}" if env else self.folder.name))

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step in order; of a step that was done twice, those of the later time."""
        rows = {row["step"]: row for row in self._lines if HELD_OUT not in row}
        return [rows[step] for step in sorted(rows)]

    @cached_property
    def held_out(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation on the way, by the steps that were done before it."""
        rows = {row["step"]: row for row in self._lines if HELD_OUT in row}
        return [rows[step] for step in sorted(rows)]

    @cached_property
    def finished(self) -> float:
        """The rollouts of all steps that have a reward."""
        return sum(self.curve("rollouts/finished").values())

    def curve(self, metric: str) -> dict[int, float]:
        """Return a metric by its step as the log counts: from 0, held-out ones by the steps before; without gaps."""
        return self._curves.get(metric, {})

    @cached_property
    def _curves(self) -> dict[str, dict[int, float]]:
        """Every metric by its step: the log is gone through once, however many metrics are asked for."""
        found: dict[str, dict[int, float]] = {}
        for rows, held_out in ((self.steps, False), (self.held_out, True)):
            for row in rows:
                for metric, given in row.items():
                    if metric.startswith("eval/") == held_out and (value := measured(given)) is not None:
                        found.setdefault(metric, {})[row["step"]] = value
        return found

    @cached_property
    def _file(self) -> dict[str, Any]:
        return read_json(self.folder / SETTINGS)

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl: the last one may still be written."""
        path = self.folder / METRICS
        content = _content(path)
        if (count := content.count(b"\n")) > MOST_LINES:
            raise UnreadableFileError(f"{path}: it has {count:,} lines, and at most {MOST_LINES:,} are read")
        found = [_metrics(line) for line in content.split(b"\n")]
        return [row for row in found if isinstance(row.get("step"), int) and measured(row["step"]) is not None]


def measured(value: object) -> float | None:
    """Return a metric as a number that can be drawn and averaged; None for what is no finite number.

    One of a size above LARGEST is left out, too.
    """
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # JSON has whole numbers that are larger than any float
        return None
    return found if abs(found) <= LARGEST else None


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of an object, such as `sampling`, under names with a dot."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        parts = {f"{name}.{part}": of for part, of in value.items()} if isinstance(value, dict) else {}
        found |= parts or {name: value}
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; an empty one where there is none, or what it holds is none.

    UnreadableFileError for what is no regular file, or too large.
    """
    return _parsed(_content(path))


def _content(path: Path) -> bytes:
    """The bytes of a file of the folder that it is in; none where there is no file."""
    try:
        return read_bytes(path, within=path.parent)
    except FileNotFoundError:
        return b""


def _metrics(line: bytes) -> dict[str, Any]:
    """The numbers of a line; none of one that is damaged."""
    found = _parsed(line) if len(line) <= LONGEST else {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = parsed(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def kept_runs(folders: Sequence[Path]) -> list[KeptRun]:
    """Return the runs and evaluations of these folders; of a folder that is none, those right below it.

    AgentGymError for a folder that is not there or holds none, and where two names lead to one folder.
    """
    found: dict[Path, KeptRun] = {}
    for folder in folders:
        for path in _runs_of(folder):
            if path.resolve() in found:
                raise AgentGymError(f"runs: {path} is named twice; name each run once")
            found[path.resolve()] = KeptRun(path)
    return list(found.values())


def _runs_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise AgentGymError(f"runs: there is no folder {folder}; name the folder of a run, such as runs/RECIPE/TIME")
    if _is_run(folder):
        return [folder]
    below = sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))
    if not below:
        raise AgentGymError(
            f"runs: {folder} holds no {METRICS} and no {FILE}, nor does a folder in it; name the folder of a run, such "
            "as runs/RECIPE/TIME"
        )
    return below


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS, FILE))
