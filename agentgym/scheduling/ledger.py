"""Counts of everything that was started for a batch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

from agentgym.environments.env import TaskT
from agentgym.scheduling.accounting import BatchStats, LifecycleCounts
from agentgym.scheduling.gate import RolloutUsage
from agentgym.scheduling.group_state import GroupState
from agentgym.scheduling.sampler_state import InPlay


class Ledger(Generic[TaskT]):
    """Counts groups when they are started, dropped and returned, and computes each batch's `BatchStats`.

    `rollouts` is the number of rollouts started per group. `lost` is the work that was in progress when an earlier
    process of the run stopped; the first batch counts it as dropped.
    """

    def __init__(self, rollouts: int, lost: InPlay) -> None:
        self.replaced = 0
        """Number of this batch's groups that were replaced because they have no signal."""
        self._rollouts, self._lost = rollouts, lost
        self._started, self._resumed = lost.started, lost.resumed
        self._dropped: list[GroupState[TaskT]] = []

    def start(self) -> None:
        """Count a group that is started."""
        self._started += 1

    def drop(self, group: GroupState[TaskT]) -> None:
        """Count a group that is dropped."""
        self._dropped.append(group)

    def replace(self) -> None:
        """Count a group without signal that is replaced; it is also counted as dropped."""
        self.replaced += 1

    def in_play(self, groups: Iterable[GroupState[TaskT]], requests: Mapping[str, int]) -> InPlay:
        """Return the work that would be lost if the process stopped now.

        `groups` are the groups in progress, and `requests` the gate's counts of requests.
        """
        usages = _usages([*groups, *self._dropped])
        return InPlay(
            started=self._started,
            resumed=self._resumed,
            tokens=_tokens(usages) + self._lost.tokens,
            requests=dict(requests),
        )

    def batch_done(self, carried: int) -> list[GroupState[TaskT]]:
        """Begin the counts of the next batch, and return the groups that were dropped in this one.

        `carried` is the number of groups that stay in progress.
        """
        dropped, self._dropped = self._dropped, []
        self._started, self._resumed, self.replaced, self._lost = 0, carried, 0, InPlay()
        return dropped

    def stats(
        self, batch: Sequence[GroupState[TaskT]], carried: int, *, version: int, requests: LifecycleCounts
    ) -> BatchStats:
        """Return the stats of a batch.

        `carried` is the number of groups that stay in progress, `version` the current policy version, and `requests`
        the batch's counts of requests to the engine.
        """
        kept = [usage for group in batch for usage in group.played]
        lost = self._lost_usages(batch)
        cut = [usage for usage in lost if usage.began is not None]
        rewards = [r.reward for group in [*batch, *self._dropped] for r in group.scored if r.reward is not None]
        ages = [version - group.oldest_token(version) for group in batch]
        return BatchStats(
            rollouts=self._rollout_counts(batch, carried),
            groups=self._group_counts(batch, carried),
            requests=requests,
            without_signal=self.replaced,
            kept_tokens=_tokens(kept),
            dropped_tokens=_tokens(lost) + self._lost.tokens,
            kept_s=_seconds(kept),
            cut=len(cut),
            cut_s=_seconds(cut),
            cut_shares=sum(map(_cut_share, batch)),
            scored=len(rewards),
            score=sum(rewards),
            staleness=sum(ages),
            stalest=max(ages, default=0),
        )

    def _rollout_counts(self, batch: Sequence[GroupState[TaskT]], carried: int) -> LifecycleCounts:
        return LifecycleCounts(
            started=self._started * self._rollouts,
            resumed=self._resumed * self._rollouts,
            finished=sum(len(group.scored) for group in batch),
            dropped=len(self._lost_usages(batch)) + self._lost.groups * self._rollouts,
            carried=carried * self._rollouts,
            failed=sum(len(group.failed) for group in batch),
        )

    def _group_counts(self, batch: Sequence[GroupState[TaskT]], carried: int) -> LifecycleCounts:
        failed = sum(not group.scored for group in batch)
        return LifecycleCounts(
            started=self._started,
            resumed=self._resumed,
            finished=len(batch) - failed,
            dropped=len(self._dropped) + self._lost.groups,
            carried=carried,
            failed=failed,
        )

    def _lost_usages(self, batch: Sequence[GroupState[TaskT]]) -> list[RolloutUsage]:
        """Return the usage of the rollouts that were given up.

        These are the rollouts that were cut from the batch's groups, and all rollouts of the groups that were dropped.
        """
        return [*(usage for group in batch for usage in group.cut), *_usages(self._dropped)]


def _cut_share(group: GroupState[TaskT]) -> float:
    """Return the share of a group's started rollouts that were cut."""
    cut = sum(usage.began is not None for usage in group.cut)
    return cut / (len(group.ended) + cut) if cut else 0.0


def _usages(groups: Iterable[GroupState[TaskT]]) -> list[RolloutUsage]:
    return [usage for group in groups for usage in group.usages]


def _tokens(usages: Iterable[RolloutUsage]) -> int:
    return sum(usage.tokens for usage in usages)


def _seconds(usages: Iterable[RolloutUsage]) -> float:
    return sum(usage.seconds for usage in usages)
