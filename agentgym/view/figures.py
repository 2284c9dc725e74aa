"""The figures of a run for its curves: the lines of metrics.jsonl, and how their names are put into charts."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.run.log import HELD_OUT, METRICS

GROUPS: tuple[dict[str, Any], ...] = (
    {
        "title": "reward",
        "names": ["reward", "reward/*", "role/*"],
        "unit": "",
        "help": "Mean reward of a step's scored rollouts, its parts by name, and reward/std, their spread.",
    },
    {
        "title": "held-out",
        "names": ["eval/*"],
        "unit": "",
        "help": "Scores on tasks that are not trained on, after so many steps.",
    },
    {
        "title": "groups",
        "names": ["groups/solved_by_none", "groups/solved_by_all", "samples/groups", "samples/groups_without_signal"],
        "unit": "",
        "help": "Groups whose rollouts all fail, all succeed, or all have one reward teach nothing.",
    },
    {
        "title": "length",
        "names": ["length/*", "tokens/*"],
        "unit": "tokens",
        "help": "Quantiles of what was sampled, by rollout and by turn.",
    },
    {
        "title": "turns and segments",
        "names": ["rollout/turns", "segments", "rollout/compactions", "rollout/forks"],
        "unit": "",
        "help": "Turns and segments of a rollout, mean over the scored ones.",
    },
    {
        "title": "entropy",
        "names": ["train/entropy"],
        "unit": "nats",
        "help": "Mean entropy of the policy where it sampled; near 0 it explores no more.",
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
        "unit": "",
        "help": "Loss, norm of the gradient, distance to the old policy, share of clipped tokens, learning rate.",
    },
    {
        "title": "time of a step",
        "names": ["time/*"],
        "unit": "s",
        "help": "Wall time of a step by its parts; time/step is the whole of it.",
    },
    {
        "title": "throughput",
        "names": ["throughput/*"],
        "unit": "tokens/s",
        "help": "Sampled tokens by second of a step, and trained tokens by second of its training.",
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
        "unit": "",
        "help": "Rollouts, groups and requests that were cut off, left out or carried over, and the bias of that.",
    },
    {
        "title": "errors by kind",
        "names": ["failures/*", "rollouts/failed", "rollout/malformed_calls", "rollout/tool_errors", "tools/*/errors"],
        "unit": "",
        "help": "Rollouts without a reward by the kind of error, and calls of tools that failed.",
    },
    {
        "title": "tools",
        "names": ["rollout/tool_calls", "tools/*/calls"],
        "unit": "",
        "help": "Calls by the name of the tool.",
    },
    {
        "title": "how rollouts end",
        "names": ["stop/*"],
        "unit": "share",
        "help": "Shares of the scored rollouts by what stopped them.",
    },
)
"""The charts of figures, in their order; "*" stands for any text, and what is in none of them comes last."""


def metric_rows(folder: Path, after: int = 0) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of whole lines, and the rows of those behind the first `after`; a damaged line is left out.

    A row's time is the seconds that the steps up to it took, which is nearly the time since the run began.
    """
    path = folder / METRICS
    content = path.read_bytes() if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    rows, clock = [], 0.0
    for place, line in enumerate(lines):
        figures = _figures(line)
        if figures is None:
            continue
        step, held_out = int(figures.pop("step")), HELD_OUT in figures
        clock += seconds if math.isfinite(seconds := figures.get("time/step") or 0.0) else 0.0
        if place >= after:
            rows.append({"step": step, "time": round(clock, 3), "held_out": held_out, "figures": figures})
    return len(lines), rows


@dataclass(slots=True)
class Progress:
    """Says how far the figures of a run are; a file that has grown is read on from where it was read to."""

    folder: Path
    lines: int = 0
    steps: int = 0
    """Steps that are done."""
    reward: float | None = None
    """The last one that is known."""
    _read: int = 0
    _file: int = 0

    def look(self) -> None:
        """Read what was written since the last look; all of it where a resumed run has cut the file."""
        try:
            with (self.folder / METRICS).open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, True) != (self._file, status.st_size >= self._read):
                    self.lines, self.steps, self.reward, self._read, self._file = 0, 0, None, 0, status.st_ino
                file.seek(self._read)
                content = file.read()
        except OSError:  # none yet, or none that may be read: its figures say why where they are asked for
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self.lines += 1
            figures = _figures(line)
            if figures is not None and HELD_OUT not in figures:
                self.steps = int(figures["step"]) + 1
                self.reward = self.reward if (reward := figures.get("reward")) is None else reward


def _figures(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {name: value for name, value in row.items() if value is None or _is_figure(value)}


def _is_figure(value: object) -> bool:
    """Whether it is a number that a float can hold; JSON has larger ones."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
