"""The report at the end of a run: what was learned, what wasn't and why, and where to look."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from agentgym.files.names import command
from agentgym.machine.resources import peak_memory
from agentgym.run.metrics.batch import tool_counts
from agentgym.run.metrics.health import signs
from agentgym.scheduling.accounting import Groups
from agentgym.store.tool_counts import FailureCounts, ToolCounts

NOTHING: Mapping[str, int] = MappingProxyType({})
ENDS = 5
"""Maximum number of steps at each end of a run over which the report and summary.json average the reward."""
MOST = 5
"""Maximum number of different errors or kinds of failures that a summary names."""


class Report:
    """Counts failures by kind and tool calls by name, and checks whether rewards vary.

    `rows` are the metrics of the steps before a resume. Tool calls and rewards include those steps; kinds of failures
    are counted only since the resume.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.failures = FailureCounts()
        self.tools = ToolCounts()
        self.rewards: set[float] = set()
        self.resumed = len(rows)
        for row in rows:
            self.tools.add(tool_counts(row))
            if (mean := row.get("reward")) is not None:
                spread = row.get("reward/std") or 0.0
                self.rewards |= {mean - spread, mean + spread}

    def add(self, groups: Groups) -> None:
        """Count the failures, tool calls and rewards of a batch."""
        self.tools.add(ToolCounts.of(groups.rollouts))
        self.failures.add(groups.rollouts)
        for rollout in groups.rollouts:
            if rollout.reward is not None and len(self.rewards) < 2:
                self.rewards.add(rollout.reward)

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the counts under the names that they have in summary.json. `rows` are the metrics of all steps."""
        return {
            "optimizer_steps": _total(rows, "train/optimizer_steps"),
            "groups_without_signal": _total(rows, "samples/groups_without_signal"),
            "failed": _total(rows, "rollouts/failed"),
            "seconds_stood_still": round(sum(row.get("time/stood_still", 0.0) for row in rows), 1),
            "failures": dict(self.failures.most_common(MOST)),
            "tool_errors": dict(self.tools.errors.most_common()),
            **{name: _of_rollouts(rows, name) for name in BRANCHES if any(f"rollout/{name}" in row for row in rows)},
            **({"explained_variance": known[-1]} if (known := _known(rows)) else {}),
            "warnings": self.warnings(rows),
        }

    def warnings(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return one sentence for each sign that this run has learned nothing or got worse.

        `rows` are the metrics of all steps.
        """
        said = []
        if rows and not _total(rows, "train/optimizer_steps"):
            said.append("No optimizer step was taken: the policy is the same as at the start of the run.")
        if rows and all(row.get("samples/groups_without_signal") == row.get("samples/groups", -1) for row in rows):
            said.append("No group had a signal: within each group, all rollouts have the same reward.")
            if _of_rollouts(rows, "branches"):
                said[-1] += " The same is true of the branches from each state."
        if any("rollout/branches" in row for row in rows) and not _of_rollouts(rows, "branches"):
            said.append("No branch was run: branching.after and branching.every selected no state in any rollout.")
        taught = any("teacher/divergence" in row for row in rows)
        if len(self.rewards) == 1 and not taught:
            said.append(
                f"The reward never varied: every training rollout has a reward of {next(iter(self.rewards)):g}."
            )
        said += signs(rows, hold=1, resumed=self.resumed).values()
        failing = self.tools.failing().items()
        said += [f"The tool {name!r} failed in {errors} of {calls} calls." for name, (errors, calls) in failing]
        if len(self.failures):
            text, times = self.failures.most_common(1)[0]
            said.append(f"{self.failures.total()} rollouts failed; the most frequent error ({times} times): {text}")
        return said


PARTS = ("collect", "train", "sync", "eval", "save", "teacher")
"""The parts of a step whose time is measured."""
LEAST_SHARE = 0.01
"""Smallest share of the time for which a part is named."""
BRANCHES = ("branches", "branches_failed", "branch_tokens")
"""The metrics of a rollout that count its branches."""
LIMITS = ("turns", "seconds", "context", "length", "tokens")
"""The stop reasons that are limits: a rollout that ends for one of them was cut off."""
UNLEARNED = {
    "rollouts/dropped": "dropped rollouts",
    "samples/untrained_tokens": "tokens in segments that are not trained on",
    "train/skipped_steps": "skipped optimizer steps: the loss or the gradient was not finite",
    "train/untrained_steps": "mini-batches without tokens to train on",
}
"""Descriptions of data that wasn't learned from, by the name of the metric that counts it. Groups without a signal and
failed rollouts are described separately.
"""


def account(
    rows: Sequence[Mapping[str, Any]], held_out: Mapping[int, float], lost: Mapping[str, int] = NOTHING
) -> list[str]:
    """Return the lines of the report: what was learned, what wasn't learned from and why, and what was cut off.

    If there are branches or a critic, a line describes them.

    Args:
        rows: The metrics of all steps.
        held_out: The held-out scores, by the number of steps finished before them.
        lost: A cluster run's counts of lost processes and rollouts.
    """
    return [
        *under(_verdict(rows, held_out), _learned(rows, held_out)),
        *under("branches", _branches(rows)),
        *under("critic", _critic(rows)),
        *under("not learned from", _unlearned(rows)),
        *under("cut off", _cut_off(rows)),
        *under("lost", _lost(lost)),
        *under("time", _time(rows)),
    ]


def look_at_failed(folder: Path) -> str:
    """Return the end of a sentence about failed rollouts: the command that shows them."""
    return f"; `{command('show', folder, '--failed')}` shows them"


def under(heading: str, lines: Sequence[str]) -> list[str]:
    """Put the heading before the first line, and align the other lines below it."""
    indent = " " * (len(heading) + 2)
    return [f"{indent if number else heading + ': '}{line}" for number, line in enumerate(lines)]


def rewards_at_ends(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, int] | None:
    """Return the mean reward of the first and of the last steps, and the number of steps in each mean.

    Each mean is over 5 steps (`ENDS`), or over half of the steps if there are fewer than 10, so that the two means have
    no step in common. If only one step has a reward, both are its reward. Returns None if no step has a reward.
    """
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    if not rewards:
        return None
    many = max(1, min(ENDS, len(rewards) // 2))
    return fmean(rewards[:many]), fmean(rewards[-many:]), many


def _learned(rows: Sequence[Mapping[str, Any]], held_out: Mapping[int, float]) -> list[str]:
    steps = _total(rows, "train/optimizer_steps")
    if not steps:
        return ["no optimizer step was taken"] if rows else []
    said = []
    if len(held_out) > 1:
        said.append(
            f"held-out reward {held_out[min(held_out)]:.2f} at the start, {held_out[max(held_out)]:.2f} at the end"
        )
    if (ends := rewards_at_ends(rows)) is not None:
        first, end, many = ends
        of_first, of_last = (
            ("the first step", "the last") if many == 1 else (f"the first {many} steps", f"the last {many}")
        )
        said.append(f"training reward {first:.2f} in {of_first}, {end:.2f} in {of_last}")
    if shares := [share for row in rows if (share := row.get("oversample/cut_share"))]:
        cut = f"{sum(shares) / len(rows):.0%} of a group's rollouts were cut before they ended"
        said.append(f"these training rewards are those of the rollouts that ended first: {cut}, without a reward")
    rollouts = f"{_total(rows, 'samples/rollouts_trained'):,} of {_total(rows, 'rollouts/started'):,} rollouts"
    return [*said, f"{steps:,} optimizer steps on {rollouts}, {_total(rows, 'train/trained_tokens'):,} tokens"]


def _verdict(rows: Sequence[Mapping[str, Any]], held_out: Mapping[int, float]) -> str:
    """Return the first heading of the report: "learned" if the reward rose, "got worse" if it fell.

    The reward is the held-out one or, with fewer than two evaluations, the training reward. If it is the same, the
    heading is "reward unchanged". For a run with a teacher whose reward is the same, and for a run without a reward, it
    is "trained", and without an optimizer step "learned nothing".
    """
    if not _total(rows, "train/optimizer_steps"):
        return "learned nothing"
    if len(held_out) > 1:
        first, end = held_out[min(held_out)], held_out[max(held_out)]
    elif (ends := rewards_at_ends(rows)) is not None:
        first, end, _ = ends
    else:
        return "trained"
    first, end = round(first, 2), round(end, 2)
    taught = any("teacher/divergence" in row for row in rows)  # learning from a teacher may not raise rewards
    if end != first:
        return "learned" if end > first else "got worse"
    return "trained" if taught else "reward unchanged"


def _branches(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line with the number of branches that were run, and their share of the sampled tokens."""
    many, failed, tokens = (_of_rollouts(rows, name) for name in BRANCHES)
    if not many:
        return []
    sampled = _sum_over_rollouts(rows, "tokens/sampled")
    lost = f" ({failed:,} failed)" if failed else ""
    return [f"{many:,}{lost}, with {tokens / sampled:.0%} of the sampled tokens" if sampled else f"{many:,}{lost}"]


def _critic(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line with the share of the variance of the returns that the critic explained."""
    known = _known(rows)
    return [f"explained variance {known[0]:.2f} at the start, {known[-1]:.2f} at the end"] if known else []


def _known(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the finite explained variances of the steps."""
    found = [row.get("train/explained_variance") for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]


def _unlearned(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    said = []
    if silent := _total(rows, "samples/groups_without_signal"):
        solved = sum((row.get("groups/solved_by_all") or 0) * (row.get("samples/groups") or 0) for row in rows)
        beside = ", including those of their branches" if _of_rollouts(rows, "branches") else ""
        why = f"whose rewards are all equal{beside}" + (
            f"; {solved:.0f} groups solved by all rollouts" if solved else ""
        )
        said.append(f"{silent:,} of {_total(rows, 'samples/groups'):,} groups, {why}")
    if failed := _total(rows, "rollouts/failed"):
        kinds = Counter({name: _total(rows, name) for row in rows for name in row if name.startswith("failures/")})
        named = ", ".join(f"{name.removeprefix('failures/')} {times:,}" for name, times in kinds.most_common(MOST))
        said.append(f"{failed:,} failed rollouts" + (f": {named}" if named else ""))
    counts = {what: _total(rows, name) for name, what in UNLEARNED.items()}
    return said + [f"{count:,} {what}" for what, count in counts.items() if count]


def _cut_off(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line with the share of the rollouts that each limit ended."""
    finished = sum(row.get("rollouts/finished") or 0 for row in rows)
    ended = {reason: _sum_over_rollouts(rows, f"stop/{reason}") for reason in LIMITS}
    shares = {reason: count / finished for reason, count in ended.items() if count}
    if not shares:
        return []
    return [", ".join(f"{share:.1%} of the rollouts by the {reason} limit" for reason, share in shares.items())]


def _time(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line with the share of the steps' time that each part took, and the peak memory of the process."""
    whole = sum(row.get("time/step") or 0 for row in rows)
    if not whole:
        return []
    parts = {name: sum(row.get(f"time/{name}") or 0 for row in rows) / whole for name in PARTS}
    said = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= LEAST_SHARE)
    gpu = max((row.get("train/gpu_memory_gib") or 0 for row in rows), default=0)
    peak = f"peak memory {peak_memory() / 2**30:.1f} GiB" + (f", {gpu:.1f} GiB of a GPU for training" if gpu else "")
    return [f"{whole:,.0f} s for {len(rows):,} steps: {said}; {peak}"]


def _lost(counts: Mapping[str, int]) -> list[str]:
    """Return lines on the parts that a run on a cluster has lost, and on the rollouts lost with them."""
    said = [
        f"{part.replace('_', ' ')} {lost:,} ({counts[f'{part}_replaced']:,} replaced)"
        for name, lost in counts.items()
        if lost and (part := name.removesuffix("_lost")) != name and part != "rollouts"
    ]
    if rollouts := counts.get("rollouts_lost"):
        said.append(f"{rollouts:,} rollouts that were running on lost workers, counted as dropped and run again")
    return said


def _of_rollouts(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return round(_sum_over_rollouts(rows, f"rollout/{name}"))


def _sum_over_rollouts(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the sum over finished rollouts of a metric that steps record as a mean."""
    return sum((row.get(name) or 0) * (row.get("rollouts/finished") or 0) for row in rows)


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return int(sum(row.get(name) or 0 for row in rows))
