"""The data that a report reads from the folder of a run or evaluation, without writing to it."""

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
"""Largest number of bytes in a line of metrics.jsonl. Runs write a few thousand."""
MOST_LINES = 100_000
"""Maximum number of lines in metrics.jsonl. A run's lines are so long that its file exceeds the limit on bytes
first.
"""
LARGEST = 1e150
"""Absolute value above which a metric is left out, because squares and sums of larger ones overflow."""


@dataclass(frozen=True)
class KeptRun:
    """The folder of a run or evaluation, which may still be written to."""

    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name; for an evaluation, the settings that it started with."""
        content = self._file
        kept = content.get("settings")
        if isinstance(kept, dict):
            return kept
        return _dotted({name: value for name, value in content.items() if name not in ("versions", "envs")})

    @cached_property
    def envs(self) -> dict[str, str]:
        """The hash of each env's files, by the env's name."""
        found = self._file.get("envs")
        named = found if isinstance(found, dict) else {}
        return {name: str(of.get("sha256")) for name, of in named.items() if isinstance(of, dict)}

    @cached_property
    def versions(self) -> dict[str, Any]:
        """The package versions that the run started with."""
        found = self._file.get("versions")
        return found if isinstance(found, dict) else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The metrics at the end of the run; empty before that."""
        return read_json(self.folder / SUMMARY)

    @property
    def is_training(self) -> bool:
        """Whether this is a training run; otherwise it is an evaluation."""
        return isinstance(self._file.get("settings"), dict) or (self.folder / METRICS).is_file()

    @property
    def has_rollouts(self) -> bool:
        """Whether the folder has a rollout store."""
        return (self.folder / FILE).is_file()

    @property
    def name(self) -> str:
        """The recipe, or for an evaluation its env; the folder's name if the settings name neither."""
        env = str(self.settings.get("env", "")).rpartition(":")[2]
        return str(self.settings.get("recipe") or (f"evaluation of {env}" if env else self.folder.name))

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step, in order; for a repeated step, those of its last repetition."""
        rows = {row["step"]: row for row in self._lines if HELD_OUT not in row}
        return [rows[step] for step in sorted(rows)]

    @cached_property
    def held_out(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation during training, sorted by the number of steps done before it."""
        rows = {row["step"]: row for row in self._lines if HELD_OUT in row}
        return [rows[step] for step in sorted(rows)]

    @cached_property
    def finished(self) -> float:
        """Number of rollouts with a reward, over all steps."""
        return sum(self.curve("rollouts/finished").values())

    def curve(self, metric: str) -> dict[int, float]:
        """Return a metric's values by step, as numbered in the log; steps without a value are left out.

        Steps count from 0. A held-out metric's step is the number of steps done before it.
        """
        return self._curves.get(metric, {})

    @cached_property
    def _curves(self) -> dict[str, dict[int, float]]:
        """Every metric by step, collected in one pass over the log, however many metrics are requested."""
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
        """The rows of metrics.jsonl; a last line that is still being written is left out."""
        path = self.folder / METRICS
        content = _content(path)
        if (count := content.count(b"\n")) > MOST_LINES:
            raise UnreadableFileError(f"{path} has {count:,} lines, but the limit is {MOST_LINES:,}")
        found = [_metrics(line) for line in content.split(b"\n")]
        return [row for row in found if isinstance(row.get("step"), int) and measured(row["step"]) is not None]


def measured(value: object) -> float | None:
    """Return a metric as a number that can be drawn and averaged.

    Returns None if the value is not a finite number, or if its absolute value is above LARGEST.
    """
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # JSON integers may be larger than any float
        return None
    return found if abs(found) <= LARGEST else None


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the fields of objects such as `sampling` under dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        parts = {f"{name}.{part}": of for part, of in value.items()} if isinstance(value, dict) else {}
        found |= parts or {name: value}
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if the file doesn't exist or doesn't contain an object.

    Raises:
        UnreadableFileError: If it is not a regular file, or is too large.
    """
    return _parsed(_content(path))


def _content(path: Path) -> bytes:
    """Return the bytes of a file, or b"" if it doesn't exist. A link must not lead out of the file's folder."""
    try:
        return read_bytes(path, within=path.parent)
    except FileNotFoundError:
        return b""


def _metrics(line: bytes) -> dict[str, Any]:
    """Return the numbers of a line, or {} if it is damaged."""
    found = _parsed(line) if len(line) <= LONGEST else {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = parsed(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def kept_runs(folders: Sequence[Path]) -> list[KeptRun]:
    """Return the runs and evaluations of these folders; for a folder that is neither, those directly below it.

    Raises:
        AgentGymError: If a folder doesn't exist or has no run, or if two names lead to the same folder.
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
            f"runs: neither {folder} nor a folder in it has {METRICS} or {FILE}; name the folder of a run, such "
            "as runs/RECIPE/TIME"
        )
    return below


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS, FILE))
