"""Logging of a run's metrics: JSON lines on disk, and a progress bar or lines on stderr."""

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentgym.files.disk import Refusals, disk_trouble, write_whole
from agentgym.files.foreign.content import DAMAGE, parsed
from agentgym.files.foreign.opening import UnreadableFileError, opened
from agentgym.files.foreign.values import numbers, whole
from agentgym.files.names import whole_path
from agentgym.run.summary import rewards_at_ends

METRICS = "metrics.jsonl"
"""The metrics file in the run's folder."""
EACH_STEP = ("rollouts", "training")
"""The activities that every step repeats. The progress bar shows them, but no separate line is printed for them."""
QUIET_S = 30.0
"""Seconds without a printed line after which a line reports the batch's progress, if stderr isn't a terminal."""
LONGEST_LINE = 1 << 24
"""Maximum length in bytes of a metrics line that is read."""
HELD_OUT = "eval/reward"
"""Name of the held-out score's metric, which has separate lines in metrics.jsonl."""


class MetricsLogger:
    """Writes a run's metrics: one JSON line per step in metrics.jsonl, and a progress bar on stderr.

    If stderr isn't a terminal, it prints one line per step instead of the bar. Non-finite metrics are null in
    metrics.jsonl and are counted in `metrics_not_finite`. A line that can't be written to disk stays in memory and is
    retried with the next one. No line is left half written.

    Args:
        folder: The run's folder.
        steps: Total number of steps of the run.
        shown: Whether this process writes the file and prints.
        done: Number of steps that a resumed run has finished. Lines of later steps, which the stopped run left, are
            removed from the file.
        rollouts: Number of rollouts per batch that this process runs; 0 if unknown.
    """

    def __init__(self, folder: Path, *, steps: int, shown: bool = True, done: int = 0, rollouts: int = 0) -> None:
        self.folder = whole_path(folder)
        self.disk = Refusals(self.alert)
        """Counts this run's failed disk writes."""
        self.rows: list[dict[str, float]] = []
        self.held_out_rewards: dict[int, float] = {}
        """The held-out scores, including those before a resume, by the number of steps finished before them."""
        self._steps, self._shown, self._done = steps, shown, done
        self._rollouts, self._ended = rollouts, 0
        self._said_at = time.monotonic()
        self._file: int | None = None
        self._unwritten = b""
        """Bytes of the file that couldn't be written to disk yet."""
        self._console = Console(file=sys.stderr)
        self._lines = shown and not self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not shown or self._lines,
        )

    def __enter__(self) -> "MetricsLogger":
        if self._shown:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / METRICS
            if self._done:
                self.rows, self.held_out_rewards = cut_back(path, self._done)
            self._file = _opened(path, 0 if self._done else os.O_TRUNC)
        self._began = time.monotonic()
        self._bar.start()
        self._job = self._bar.add_task("starting", total=self._steps, completed=self._done, metrics="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._file is not None:
            self._write_rest()
            if left := self._unwritten.count(b"\n"):
                self.disk.counts[f"lines of {METRICS} that are lost"] = left
            os.close(self._file)
            self._file = None

    def follow(self, folder: Path, *, lost: bool) -> None:
        """Continue writing in the run's folder at its new path.

        Args:
            folder: The folder's new path.
            lost: Whether the metrics file is gone and has to be rewritten. Otherwise, it was moved with the folder.
        """
        self.folder = folder
        if lost and self._file is not None:
            self._open_again(_content(self._file) + self._unwritten)

    def follow_file(self) -> str | None:
        """Continue at the metrics file's path if the file was removed or replaced.

        A removed file is written again. If another file has replaced it, the lines that the other file lacks are
        added there.

        Returns:
            A sentence that says what happened; None if the file wasn't removed or replaced, or if it couldn't be
            opened.
        """
        path = self.folder / METRICS
        try:
            return self._followed(path)
        except (OSError, UnreadableFileError) as error:
            self.disk.refused(METRICS, str(error), then="its lines still go to the file opened before")
            return None

    def _followed(self, path: Path) -> str | None:
        if self._file is None:
            return None
        try:
            if os.path.samestat(path.stat(), os.fstat(self._file)):
                return None
            said = f"{path} was replaced by another file; adding the lines that it lacks."
        except FileNotFoundError:
            said = f"{path} was removed; writing it again."
        there = {_key(row) for line in _lines(path) if (row := _row(line)) is not None}
        whole = _content(self._file) + self._unwritten  # the disk may have accepted half of a line
        lines = [line for line in whole.splitlines() if (row := _row(line)) and _key(row) not in there]
        self._open_again(b"".join(line + b"\n" for line in lines))
        return said

    def _open_again(self, lacks: bytes) -> None:
        """Reopen the file at its path and append the bytes `lacks`, which it doesn't have yet."""
        assert self._file is not None
        before, self._file = self._file, _opened(self.folder / METRICS)
        os.close(before)
        half = os.pread(self._file, 1, max(os.fstat(self._file).st_size - 1, 0)) not in (b"", b"\n")
        self._unwritten = (b"\n" if half else b"") + lacks
        self._write_rest()

    def note(self, doing: str) -> None:
        """Display the run's current activity.

        Args:
            doing: A description of the activity, such as "loading".
        """
        self._bar.update(self._job, description=doing)
        if doing not in EACH_STEP:
            self._line(doing)

    def rollout_ended(self) -> None:
        """Count a rollout that has ended, and display how many have ended since the last step.

        If stderr isn't a terminal, print a line if none was printed for `QUIET_S` seconds.
        """
        self._ended += 1
        of = f"rollouts {self._ended}" + (f" of {self._rollouts}" if self._rollouts else "")
        self._bar.update(self._job, description=of)
        if self._lines and time.monotonic() - self._said_at >= QUIET_S:
            self._line(f"{of}  {self._pace(len(self.rows))}")

    def say(self, said: str) -> None:
        """Print a line on stderr, on the first process only.

        Args:
            said: The text of the line.
        """
        if self._shown:
            self._console.print(said, markup=False, highlight=False, soft_wrap=True)

    def alert(self, said: str) -> None:
        """Print a warning on stderr, on the first process only.

        Args:
            said: The text of the warning.
        """
        if self._shown:
            self._console.print(f"WARNING: {said}", style="bold red", markup=False, highlight=False, soft_wrap=True)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step. When this returns, the step's line is on disk unless the disk didn't accept it.

        Args:
            step: Number of the step, from 0.
            metrics: The step's metrics by name.
        """
        self.rows.append(dict(metrics))
        self._ended = 0
        self._write({"step": step, **metrics})
        recent = [reward for row in self.rows[-5:] if (reward := row.get("reward")) is not None]
        last = f"{recent[-1]:.2f} (last 5: {sum(recent) / len(recent):.2f})" if recent else "none"
        self._bar.update(self._job, advance=1, metrics=f"reward {last}")
        rate = metrics.get("throughput/sampled_tokens_per_s")
        speed = f", {rate:,.0f} tokens/s" if rate is not None and math.isfinite(rate) else ""
        done = f"step {step}, {step + 1}/{self._steps} done"
        self._line(f"{done}  reward {last}{_cut_turns(metrics)}  {self._pace(step + 1)}{speed}")

    def held_out(self, done: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation on a separate line.

        Args:
            done: Number of steps finished before the evaluation.
            metrics: The evaluation's metrics by name, including `eval/reward`, `eval/rollouts` and `eval/failed`.
        """
        self.held_out_rewards[done] = metrics[HELD_OUT]
        self._write({"step": done, **metrics})
        rollout, failed = metrics["eval/rollouts"], metrics["eval/failed"]
        counted = f"{rollout:.0f} rollouts" + (f" ({failed:.0f} failed)" if failed else "")
        self._line(f"held-out reward {metrics[HELD_OUT]:.4f} over {counted} after {done} steps")

    def sync(self) -> None:
        """Block until the lines so far would survive a power failure."""
        if self._file is not None:
            self._write_rest()
            os.fsync(self._file)

    def summary(self) -> dict[str, Any]:
        """Return totals, and the mean reward of the first and of the last steps, as in the final report."""
        first, last, _ = rewards_at_ends(self.rows) or (None, None, 0)
        calls = sum((row.get("rollout/tool_calls") or 0) * (row.get("rollouts/finished") or 0) for row in self.rows)
        return {
            "reward_first": None if first is None else round(first, 4),
            "reward_last": None if last is None else round(last, 4),
            "steps": len(self.rows),
            "rollouts": int(sum(row.get("rollouts/started") or 0 for row in self.rows)),
            "tool_calls": round(calls),
        }

    def _write(self, row: Mapping[str, float]) -> None:
        if self._file is not None:
            self._unwritten += f"{json.dumps(strict(row), allow_nan=False)}\n".encode()
            self._write_rest()

    def _write_rest(self) -> None:
        """Write as many of the pending bytes as the disk accepts."""
        assert self._file is not None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if (why := disk_trouble(error)) is None:
                raise
            self.disk.refused(METRICS, why, then="its lines are kept in memory and retried at the next step")

    def _line(self, said: str) -> None:
        self._said_at = time.monotonic()
        if self._lines:
            print(said, file=self._console.file, flush=True)

    def _pace(self, done: int) -> str:
        """Return the elapsed seconds and, once a step is finished, an estimate of the remaining ones.

        `done` is the number of finished steps, including those before a resume.
        """
        took = time.monotonic() - self._began
        if done <= self._done:
            return f"{took:.0f} s"
        left = took / (done - self._done) * (self._steps - done)
        return f"{took:.0f} s, about {left:.0f} s left"


def _cut_turns(metrics: Mapping[str, float]) -> str:
    """Return how many of a step's turns a token limit cut off, as a part of its line; "" if it has no turns."""
    finished = metrics.get("rollouts/finished", 0.0)
    turns, cut = (round(finished * metrics.get(f"rollout/{name}", 0.0)) for name in ("turns", "cut_turns"))
    return f", {cut:,} of {turns:,} turns cut" if turns else ""


def _opened(path: Path, more: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | more, 0o644)


def _content(file: int) -> bytes:
    """Return the whole content of an open file, which may have been unlinked."""
    return os.pread(file, os.fstat(file).st_size, 0)


def strict(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace non-finite metrics with None, and count them in `metrics_not_finite`."""
    odd = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**row, **dict.fromkeys(odd), "metrics_not_finite": len(odd)} if odd else dict(row)


def cut_back(path: Path, steps: int) -> tuple[list[dict[str, float]], dict[int, float]]:
    """Remove the lines of steps after the first `steps` steps from the file at `path`.

    Warns if metrics of one of the first `steps` steps are missing.

    Returns:
        The metrics of the first `steps` steps, and the held-out scores by the number of steps finished before each.
    """
    lines = _lines(path)
    kept = [line for line in lines if (row := _row(line)) is not None and row["step"] < steps]
    found = [json.loads(line) for line in kept]
    held_out = {int(row["step"]): row[HELD_OUT] for row in found if row.get(HELD_OUT) is not None}
    rows = {int(row.pop("step")): row for row in found if HELD_OUT not in row}
    if len(rows) < steps:
        warnings.warn(f"{path} has only {len(rows)} of the {steps} finished steps", stacklevel=2)
    write_whole(path, b"".join(line + b"\n" for line in kept))
    return list(rows.values()), held_out


def steps_in(path: Path) -> int:
    """Return the number of steps that have metrics in the file at `path`."""
    rows = map(_row, _lines(path))
    return sum(row is not None and HELD_OUT not in row for row in rows)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of the file at `path` one by one; none if the file doesn't exist.

    A line longer than `LONGEST_LINE` is yielded in pieces, which don't parse as metrics.
    """
    with suppress(FileNotFoundError), opened(path, within=path.parent) as file:
        while line := file.readline(LONGEST_LINE):
            yield line.rstrip(b"\r\n")


def _key(row: Mapping[str, float]) -> tuple[float, bool]:
    """Return the key of a metrics line: its step, and whether the line is an evaluation's."""
    return row["step"], HELD_OUT in row


def _row(line: bytes) -> dict[str, float] | None:
    """Parse a line of metrics; return None if it is truncated, damaged, or has values that aren't numbers."""
    try:
        row: dict[str, float] = parsed(line)
        whole(row["step"], "step")
        numbers({name: value for name, value in row.items() if value is not None}, "metrics")
    except DAMAGE:
        return None
    return row
