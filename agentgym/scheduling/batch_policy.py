"""When a batch is complete, which groups are in it, and how many are played."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from agentgym.scheduling.group_state import GroupState
from agentgym.scheduling.oversampling import Deadline, Oversample

GroupT = TypeVar("GroupT", bound=GroupState[Any])


class BatchPolicy:
    """Decides what a run's settings leave open: how many groups are in play, and when which of them are returned.

    No group is returned older than `bound` policy versions; old groups are waited for in time.
    """

    def __init__(self, oversample: Oversample, staleness: int) -> None:
        self.bound = staleness or oversample.carry
        """Policy versions by which the oldest token of a returned group may be behind; 0: nothing is carried over."""
        self.overlaps = staleness > 0
        """Whether rollouts go on while a batch is trained on."""
        self.extra_rollouts = oversample.extra_rollouts
        """Rollouts in each group beyond its size."""
        self.target = 0
        """Groups to have in play."""
        self._oversample, self._staleness = oversample, staleness
        self._wanted = self._ahead = 0
        self._deadline: Deadline | None = None

    def begin(self, wanted: int, to_come: int | None) -> None:
        """Start a batch of `wanted` groups, behind which `to_come` batches follow (None: any number)."""
        self._wanted = wanted
        self._ahead = wanted * (self._staleness if to_come is None else min(self._staleness, to_come))
        self.target = wanted + self._ahead + self._oversample.extra_groups

    def set_deadline(self, rollouts: int, passing: asyncio.Event) -> None:
        """Where the settings have a deadline, start its clock for so many rollouts; it sets `passing`."""
        if self._oversample.stop == "deadline":
            self._deadline = Deadline(rollouts, passing)

    def rollouts_ended(self, count: int) -> None:
        """So many more rollouts are done, or will not be needed."""
        if self._deadline is not None:
            self._deadline.ended(count)

    def end(self) -> None:
        """The batch has been waited for; its deadline passes no more."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def play_ahead(self) -> None:
        """From here on only the groups of the next batches are in play."""
        self.target = self._ahead

    def replaces(self, group: GroupState[Any], replaced: int) -> bool:
        """Whether a closed group gives way to another one, after so many of this batch have."""
        return not group.signal and replaced < self._oversample.replace

    def too_old(self, groups: Iterable[GroupT], version: int) -> list[GroupT]:
        """The groups that may not be returned any more."""
        return [group for group in groups if group.age(version) > self.bound]

    def enough(self, groups: Sequence[GroupT], version: int) -> bool:
        """Whether a batch can be cut now, and later batches still take in time what it leaves behind."""
        ready = sum(group.closed > 0 for group in groups)
        if ready == len(groups):
            return True
        late = self._deadline is not None and self._deadline.passed
        if ready < self._wanted and not (late and ready):
            return False
        return not self.bound or self._rest_in_time(groups, version)

    def next_batch(self, groups: Iterable[GroupT], version: int) -> list[GroupT]:
        """The closed groups that are returned next: the oldest, then those that were closed first.

        They are `wanted`, or all that have come to the bound where those are more.
        """
        ready = sorted((g for g in groups if g.closed), key=lambda g: (-g.age(version), g.closed))
        due = sum(self.bound > 0 and group.age(version) >= self.bound for group in ready)
        return ready[: max(self._wanted, due)]

    def _rest_in_time(self, groups: Sequence[GroupT], version: int) -> bool:
        """Whether the groups that this batch leaves are few enough to come before the bound, `wanted` a version."""
        taken = self.next_batch(groups, version)
        versions_left = sorted(self.bound - group.age(version) for group in groups if group not in taken)
        return all(i < versions * self._wanted for i, versions in enumerate(versions_left))
