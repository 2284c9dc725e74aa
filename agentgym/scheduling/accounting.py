"""Finished groups, and counts of everything that was started for them."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import overload

import numpy as np

from agentgym.errors import AgentGymError, SandboxError
from agentgym.rollouts.step_result import ENV_COUNTERS, OWN_COUNTED, OWN_COUNTERS
from agentgym.store.tool_counts import PER_TOOL
from agentgym.types.rollout import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleCounts:
    """How many rollouts, groups or requests of one batch were started, and how they ended.

    The counts satisfy started + resumed = finished + dropped + carried + failed.

    Raises:
        ValueError: If the counts don't add up, or if one is negative.
    """

    started: int = 0
    """Started in this batch."""
    resumed: int = 0
    """Carried over from the previous batch."""
    finished: int = 0
    """Finished and part of the batch."""
    dropped: int = 0
    """Cancelled or left out."""
    carried: int = 0
    """Still in progress after this batch; they continue in the next one."""
    failed: int = 0
    """Ended without a result."""

    def __post_init__(self) -> None:
        ended = self.finished + self.dropped + self.carried + self.failed
        if self.started + self.resumed != ended or min(getattr(self, f.name) for f in fields(self)) < 0:
            raise ValueError(f"counts: started + resumed must be finished + dropped + carried + failed, got {self}")

    def __add__(self, other: "LifecycleCounts") -> "LifecycleCounts":
        return LifecycleCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """What happened to all rollouts, groups and requests that were in progress for one batch.

    The stats of several processes or batches can be added.
    """

    rollouts: LifecycleCounts = LifecycleCounts()
    groups: LifecycleCounts = LifecycleCounts()
    requests: LifecycleCounts = LifecycleCounts()
    without_signal: int = 0
    """Groups that were dropped and replaced because they have no signal (equal scores)."""
    rested_solved: int = 0
    """Tasks that rest from this batch on because all their rollouts had the same reward and solved them."""
    rested_unsolved: int = 0
    """Tasks that rest from this batch on because all their rollouts had the same reward, but didn't solve them."""
    passed_over: int = 0
    """Number of times that a resting task was skipped."""
    resting: int = 0
    """Tasks that rest after the batch."""
    kept_tokens: int = 0
    """Sampled tokens of the finished rollouts."""
    dropped_tokens: int = 0
    """Tokens of the finished turns of the dropped rollouts; sampling them was wasted."""
    kept_s: float = 0.0
    """Seconds that the finished rollouts ran, summed."""
    cut: int = 0
    """Dropped rollouts that had started to run."""
    cut_s: float = 0.0
    """Seconds that the rollouts of `cut` ran, summed."""
    cut_shares: float = 0.0
    """Share of a group's started rollouts that were cut before they ended, summed over the returned groups."""
    scored: int = 0
    """Scored rollouts of the returned and the dropped groups."""
    score: float = 0.0
    """Sum of the scores of the rollouts of `scored`."""
    staleness: int = 0
    """Age of each returned group's oldest token, in policy versions; summed over the groups."""
    stalest: int = 0
    """Largest age, in policy versions, of any returned group's oldest token."""

    def __add__(self, other: "BatchStats") -> "BatchStats":
        return BatchStats(
            rollouts=self.rollouts + other.rollouts,
            groups=self.groups + other.groups,
            requests=self.requests + other.requests,
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            stalest=max(self.stalest, other.stalest),
        )

    def metrics(self) -> dict[str, float]:
        """Return all counts as metrics for a log, with the waste and the bias that oversampling causes."""
        kinds = {"rollouts": self.rollouts, "groups": self.groups, "requests": self.requests}
        numbers = {f"{kind}/{f.name}": float(getattr(c, f.name)) for kind, c in kinds.items() for f in fields(c)}
        return numbers | {
            "groups/without_signal_replaced": float(self.without_signal),
            "curriculum/rested_solved": float(self.rested_solved),
            "curriculum/rested_unsolved": float(self.rested_unsolved),
            "curriculum/passed_over": float(self.passed_over),
            "curriculum/resting": float(self.resting),
            "oversample/length_bias": self.length_bias,
            "oversample/cut_share": self.cut_shares / max(self.groups.finished + self.groups.failed, 1),
            "oversample/dropped_tokens": float(self.dropped_tokens),
            "oversample/reward_of_all": self.score / max(self.scored, 1),
            "staleness/mean": self.staleness / max(self.groups.finished, 1),
            "staleness/max": float(self.stalest),
        }

    @property
    def length_bias(self) -> float:
        """Mean seconds of a finished rollout divided by the mean of finished and dropped ones; 1 means no bias.

        Below 1, the batch favors short rollouts. The real ratio may be lower still, because a cancelled rollout counts
        only with its seconds until it was cut. Carried rollouts come in a later batch, so they cause no bias.
        """
        finished, seconds = self.rollouts.finished, self.kept_s + self.cut_s
        if not (finished and seconds):
            return 1.0
        return self.kept_s / finished * (finished + self.cut) / seconds


_RESTS = ("rested_solved", "rested_unsolved", "passed_over", "resting")
_SUMS = (
    *_RESTS,
    "without_signal",
    "kept_tokens",
    "dropped_tokens",
    "kept_s",
    "cut",
    "cut_s",
    "cut_shares",
    "scored",
    "score",
    "staleness",
)


class Groups(Sequence[Group]):
    """Finished groups in the order of their tasks, with their metrics.

    Args:
        groups: The groups.
        batch_stats: The counts of the batch; None if there are none.

    Raises:
        ValueError: If two groups have the same id.
    """

    def __init__(self, groups: Sequence[Group], batch_stats: BatchStats | None = None) -> None:
        self.groups = tuple(groups)
        self.batch_stats = batch_stats
        unique([group.group_id for group in self.groups])

    def __repr__(self) -> str:
        rewards = [r.reward for r in self.rollouts if r.reward is not None]
        failed, mean = len(self.rollouts) - len(rewards), f"{np.mean(rewards):g}" if rewards else "none"
        return f"<Groups: {len(self)} groups, {len(self.rollouts)} rollouts, {failed} failed, mean reward {mean}>"

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> "Groups": ...
    def __getitem__(self, index: int | slice) -> "Group | Groups":
        return Groups(self.groups[index]) if isinstance(index, slice) else self.groups[index]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, including the failed ones."""
        return [r for group in self.groups for r in group.rollouts]

    def metrics(self) -> dict[str, float]:
        """Return the batch's counts and the means over the scored rollouts.

        The counts satisfy started + resumed = finished + dropped + carried + failed.
        """
        rollouts = self.rollouts
        scored = [r for r in rollouts if r.reward is not None]
        counts = {"started": len(rollouts), "finished": len(scored), "failed": len(rollouts) - len(scored)}
        numbers = {f"rollouts/{name}": float(count) for name, count in counts.items()}
        if self.batch_stats is not None:
            numbers = self.batch_stats.metrics()
        return numbers | _means(scored) if scored else numbers


def raise_if_all_failed(groups: Groups, *, then: str = "") -> None:
    """Raise an error if no rollout has a score, since continuing would teach nothing.

    The error's message quotes the error of the first rollout.

    Args:
        groups: A whole batch, including the groups of all other processes that share it. It is not an error if all
            rollouts of a single process fail.
        then: Text to append to the error's message.

    Raises:
        SandboxError: If no rollout could get a sandbox.
        AgentGymError: If all rollouts failed for other reasons.
    """
    rollouts = groups.rollouts
    if rollouts and all(r.reward is None for r in rollouts):
        no_sandbox = all(r.failure is not None and r.failure.type == SandboxError.__name__ for r in rollouts)
        kind = SandboxError if no_sandbox else AgentGymError
        raise kind(f"all {len(rollouts)} rollouts failed; the first one: {rollouts[0].error}{then}")


def unique(ids: Sequence[str]) -> None:
    """Raise a ValueError that names the ids that occur twice; do nothing if all ids differ."""
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"groups: {twice} appear twice; each task of a batch needs a unique id")


def _means(scored: Sequence[Rollout]) -> dict[str, float]:
    means = {
        "reward": float(np.mean([r.reward for r in scored])),
        "tokens/sampled": float(np.mean([r.sampled_tokens for r in scored])),
        "tokens/total": float(np.mean([sum(len(s.token_ids) for s in r.segments) for r in scored])),
        "segments": float(np.mean([len(r.own_segments) for r in scored])),
    }
    for prefix, pick in _mappings:
        known = [pick(r) for r in scored]
        for name in dict.fromkeys(name for of in known for name in of):
            absent = 0.0 if prefix == "rollout" and is_counter(name) else None
            values = [value for of in known if (value := of.get(name, absent)) is not None]
            means[f"{prefix}/{name}"] = float(np.mean(values))
    stops = Counter(r.stop_reason for r in scored)
    return means | {f"stop/{reason}": count / len(scored) for reason, count in sorted(stops.items())}


_mappings: list[tuple[str, Callable[[Rollout], Mapping[str, float]]]] = [
    ("reward", lambda r: r.rewards),
    ("rollout", lambda r: r.metrics),
    ("role", lambda r: r.role_rewards),
]
_COUNTERS = OWN_COUNTERS | ENV_COUNTERS
_COUNTED = re.compile(f"{PER_TOOL}|{OWN_COUNTED}")
"""Matches the beginning of the name of a counter that isn't in `_COUNTERS`."""


def is_counter(metric: str) -> bool:
    """Return whether a metric counts events that agentgym itself observes.

    A rollout without such a metric has a count of 0. For any other metric, such as one that an env sets, nothing is
    known about a rollout without it.
    """
    return metric in _COUNTERS or _COUNTED.match(metric) is not None
