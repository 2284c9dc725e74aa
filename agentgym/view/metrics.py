"""The metrics of a run for its charts: the lines of metrics.jsonl, and how metrics are grouped into charts."""

import math
import os
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.files.foreign.content import parsed
from agentgym.files.foreign.opening import MOST_BYTES, UnreadableFileError, opened, read_bytes
from agentgym.run.metrics_logger import HELD_OUT, METRICS
from agentgym.view.answers import as_json

GROUPS: tuple[dict[str, Any], ...] = (
    {
        "title": "reward",
        "names": ["reward", "reward/*", "role/*"],
        "help": "Mean reward of a step's scored rollouts, its components, and reward/std, the standard deviation.",
    },
    {
        "title": "held-out",
        "names": ["eval/*"],
        "help": "Scores on held-out tasks, which are not trained on, by the number of steps before the evaluation.",
    },
    {
        "title": "groups",
        "names": ["groups/solved_by_none", "groups/solved_by_all", "samples/groups", "samples/groups_without_signal"],
        "help": "Groups whose rollouts all fail, all succeed or all have the same reward: no training signal.",
    },
    {
        "title": "length",
        "names": ["length/*", "tokens/*", "rollout/branch_tokens"],
        "unit": "tokens",
        "help": "Quantiles of sampled tokens, by rollout and by turn; tokens/* include those of branches.",
    },
    {
        "title": "turns and segments",
        "names": ["rollout/turns", "segments", "rollout/compactions", "rollout/forks"],
        "help": "Turns and segments per rollout, averaged over the scored rollouts.",
    },
    {
        "title": "branches",
        "names": ["rollout/branches", "rollout/branches_failed"],
        "help": "Branches per rollout, and failed branches, averaged over the scored rollouts.",
    },
    {
        "title": "entropy",
        "names": ["train/entropy"],
        "unit": "nats",
        "help": "Mean entropy of the policy at its sampled tokens; near 0, the policy has stopped exploring.",
    },
    {
        "title": "mismatch",
        "names": ["mismatch/*", "train/logprob_gap", "sync/logprob_gap", "sync/logprob_gap_mean"],
        "unit": "nats",
        "help": "How far the trainer's log-probabilities are from the engine's; mismatch/ess is a share of the tokens.",
    },
    {
        "title": "training",
        "names": ["train/loss", "train/grad_norm", "train/kl", "train/clip_fraction", "train/lr"],
        "help": "Loss, gradient norm, distance to the old policy, share of clipped tokens, learning rate.",
    },
    {
        "title": "critic",
        "names": ["train/explained_variance", "train/value_loss", "train/value_mean", "train/value_skipped_steps"],
        "help": "Share of the returns' variance that the critic predicts, its squared error, and its mean value.",
    },
    {
        "title": "step time",
        "names": ["time/*"],
        "unit": "s",
        "help": "Wall time of a step and of its parts; time/step is the total.",
    },
    {
        "title": "throughput",
        "names": ["throughput/*"],
        "unit": "tokens/s",
        "help": "Sampled tokens per second of a step, and trained tokens per second of its training.",
    },
    {
        "title": "staleness",
        "names": ["staleness/*"],
        "unit": "versions",
        "help": "Policy versions between the oldest token of a group and the step that trains on it.",
    },
    {
        "title": "drops",
        "names": ["*/dropped", "*/carried", "oversample/*", "curriculum/*"],
        "help": "Rollouts, groups and requests that were cut off, left out or carried over, and the resulting bias.",
    },
    {
        "title": "errors by kind",
        "names": ["failures/*", "rollouts/failed", "rollout/malformed_calls", "rollout/tool_errors", "tools/*/errors"],
        "help": "Rollouts without a reward by kind of error, and failed tool calls.",
    },
    {
        "title": "tools",
        "names": ["rollout/tool_calls", "tools/*/calls"],
        "help": "Calls by tool name.",
    },
    {
        "title": "how rollouts end",
        "names": ["stop/*"],
        "unit": "share",
        "help": "Shares of the scored rollouts by stop reason.",
    },
)
"""The charts, in order. "*" matches any text, and metrics that match no chart come last. A chart without "unit" has no
unit.
"""


LONGEST = 1 << 20
"""Largest number of bytes in a line. Runs write a few thousand."""
# Matches only what every JSON parser reads as one finite number. No part of it backtracks.
_NUMBER = rb"(?:-?(?:0|[1-9]\d{0,14}+)(?:\.\d++)?+(?:e[-+]?+\d{1,2}+)?+|null)"
_PLAIN = re.compile(
    rb'\{"step": (?P<step>0|[1-9]\d{0,14}+)(?:, (?P<metrics>"[ !#-\[\]-~]*+": %b(?:, "[ !#-\[\]-~]*+": %b)*+))?+\}'
    % (_NUMBER, _NUMBER)
)
_TOOK = re.compile(rb'"time/step": ([^,}n]+)')


@dataclass(frozen=True, slots=True)
class MetricRows:
    """The rows of a run that the browser doesn't have yet, each as JSON. Damaged lines are left out."""

    lines: int
    """Number of complete lines in the file."""
    start: int
    """Number of lines before the first row. 0 if the browser's lines are outdated, because all rows are sent then."""
    mark: int
    """Checksum that distinguishes these lines from others, such as those after the run was resumed."""
    rows: list[bytes]

    def as_json(self) -> bytes:
        """Return everything as one JSON object."""
        head = f'{{"lines":{self.lines},"from":{self.start},"mark":{self.mark},"rows":['
        return head.encode() + b",".join(self.rows) + b"]}"


def metric_rows(folder: Path, after: int = 0, mark: int | None = None) -> MetricRows:
    """Return the rows after the first `after` lines, which the browser has, or all rows if its lines are outdated.

    They are outdated if `mark` isn't the checksum of the file's first `after` lines. A row's time is the total duration
    in seconds of the steps up to it, which is close to the time since the run started. Lines in the format that runs
    write are copied into their rows without parsing, since parsing and encoding all numbers of 5,000 steps takes a
    second.
    """
    path = folder / METRICS
    try:
        content = read_bytes(path, within=folder)
    except FileNotFoundError:
        content = b""
    *lines, _ = content.split(b"\n")
    if mark is not None and _mark(lines[:after]) != mark:
        after = 0
    rows, clock = list[bytes](), 0.0
    for place, line in enumerate(lines):
        row = _plain_row(line) or _odd_row(line)
        if row is None:
            continue
        clock += row.seconds
        if place >= after:
            rows.append(b'{"time":' + as_json(round(clock, 3)) + b"," + row.rest)
    return MetricRows(len(lines), min(after, len(lines)), _mark(lines), rows)


@dataclass(frozen=True, slots=True)
class _Row:
    seconds: float
    """Duration of the step."""
    rest: bytes
    """JSON of the row, without its time."""


def _plain_row(line: bytes) -> _Row | None:
    """Return the row of a line in the format that runs write, or None if the line has another format.

    Such a line has a step, and metrics that are null or numbers of moderate size.
    """
    if (found := _PLAIN.fullmatch(line)) is None:
        return None
    held_out = b"true" if f'"{HELD_OUT}": '.encode() in line else b"false"
    took = _TOOK.search(line)
    rest = b'"step":%b,"held_out":%b,"metrics":{%b}' % (found["step"], held_out, found["metrics"] or b"")
    return _Row(float(took[1]) if took else 0.0, rest + b"}")


def _odd_row(line: bytes) -> _Row | None:
    """Return the row of any line, without values that are not numbers, or None if the line is damaged."""
    metrics = _metrics(line)
    if metrics is None:
        return None
    seconds = metrics.get("time/step") or 0.0
    row = {"step": int(metrics.pop("step")), "held_out": HELD_OUT in metrics, "metrics": metrics}
    return _Row(seconds if math.isfinite(seconds) else 0.0, as_json(row)[1:])


def _mark(lines: Sequence[bytes]) -> int:
    return zlib.crc32(b"\n".join(lines))


@dataclass(slots=True)
class Progress:
    """Tracks the progress of a run's metrics, and reads only the lines that were added since the last time."""

    folder: Path
    lines: int = 0
    steps: int = 0
    """Number of finished steps."""
    reward: float | None = None
    """The latest known reward."""
    _read: int = 0
    _file: int = 0

    def look(self) -> None:
        """Read the lines written since the last call, or the whole file if a resumed run truncated or replaced it."""
        try:
            with opened(self.folder / METRICS, within=self.folder) as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, True) != (self._file, status.st_size >= self._read):
                    self.lines, self.steps, self.reward, self._read, self._file = 0, 0, None, 0, status.st_ino
                file.seek(self._read)
                content = file.read(min(MOST_BYTES, status.st_size - self._read))
        except (OSError, UnreadableFileError):  # missing or unreadable; a request for the metrics reports why
            return
        whole = content if len(content) == MOST_BYTES else content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        self.lines += whole.count(b"\n")
        self._look_at(whole.splitlines())

    def _look_at(self, lines: list[bytes]) -> None:
        """Store the step and the reward of the last lines that have them."""
        steps: int | None = None
        for line in reversed(lines):
            metrics = _metrics(line)
            if metrics is None or HELD_OUT in metrics:
                continue
            if steps is None:
                steps = self.steps = int(metrics["step"]) + 1
            if (reward := metrics.get("reward")) is not None:
                self.reward = reward
                return


def _metrics(line: bytes) -> dict[str, Any] | None:
    """Return the numbers and nulls of a line, including its step, or None if it has no step."""
    try:
        row = parsed(line) if len(line) <= LONGEST else None
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {name: value for name, value in row.items() if value is None or _is_metric(value)}


def _is_metric(value: object) -> bool:
    """Return whether the value is a number that fits in a float; numbers in JSON may be larger."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
