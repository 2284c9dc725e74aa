"""A run's figures, as lines on disk and a bar on the screen."""

import json
import math
import os
import stat
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Log:
    """A run's figures: one JSON line a step in metrics.jsonl, and a progress bar on stderr.

    With `done` it goes on after so many steps: the lines of later ones, which a run that died left behind, are cut.
    """

    def __init__(self, folder: Path, *, steps: int, shown: bool = True, done: int = 0) -> None:
        self.folder = folder
        self.rows: list[dict[str, float]] = []
        self._steps, self._shown, self._done = steps, shown, done
        self._file: IO[str] | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not shown,
        )

    def __enter__(self) -> "Log":
        if self._shown:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "metrics.jsonl"
            if self._done:
                self.rows = cut_back(path, self._done)
            self._file = path.open("a" if self._done else "w")
        self._bar.start()
        self._job = self._bar.add_task("starting", total=self._steps, completed=self._done, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._file is not None:
            self._file.close()

    def note(self, doing: str) -> None:
        """Say what is going on now."""
        self._bar.update(self._job, description=doing)

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        """Record one step; the line is on disk when this returns."""
        self.rows.append(dict(figures))
        if self._file is not None:
            self._file.write(json.dumps({"step": step} | _in_json(figures), allow_nan=False) + "\n")
            self._file.flush()
        recent = [row["reward"] for row in self.rows[-5:]]
        shown = f"reward {figures['reward']:.2f} (last 5: {sum(recent) / len(recent):.2f})"
        self._bar.update(self._job, advance=1, figures=shown)

    def sync(self) -> None:
        """The lines so far outlive a power cut; a pipe's reader has them anyway."""
        if self._file is not None and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            os.fsync(self._file.fileno())

    def summary(self) -> dict[str, Any]:
        """Mean reward of the first and last five steps, and totals."""
        rewards = [row["reward"] for row in self.rows]
        calls = sum(row.get("rollout/tool_calls", 0.0) * row["rollouts/finished"] for row in self.rows)
        return {
            "reward_first": round(float(np.mean(rewards[:5])), 4) if rewards else None,
            "reward_last": round(float(np.mean(rewards[-5:])), 4) if rewards else None,
            "steps": len(self.rows),
            "rollouts": int(sum(row["rollouts/started"] for row in self.rows)),
            "tool_calls": round(calls),
        }


def _in_json(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Figures that strict JSON holds: null for one that is not finite, and how many those are."""
    told = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    odd = sum(value is None for value in told.values())
    return told | {"figures_not_finite": float(odd)} if odd else told


def cut_back(path: Path, steps: int) -> list[dict[str, float]]:
    """The figures of the first `steps` steps, and a file at `path` that holds no others; warns where one is missing."""
    text = path.read_text() if path.exists() else ""
    kept = [line for line in text.splitlines() if (row := _row(line)) is not None and row["step"] < steps]
    rows = {int(row.pop("step")): row for row in map(json.loads, kept)}
    if len(rows) < steps:
        warnings.warn(f"{path} has {len(rows)} of the {steps} steps that were done", stacklevel=2)
    fresh = path.with_name(f".{path.name}-cut")
    fresh.write_text("".join(f"{line}\n" for line in kept))
    fresh.replace(path)
    return list(rows.values())


def _row(line: str) -> dict[str, float] | None:
    """The figures of a line; None for one that was cut off in the middle."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None
