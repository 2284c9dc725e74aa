"""Rollouts that are started beyond those that are needed: how many, when a batch is complete, and which are in it."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from agentgym.config_fields import Count, config
from agentgym.scheduling.group_state import GroupState

GroupT = TypeVar("GroupT", bound=GroupState[Any])

StopRule: TypeAlias = Literal["all", "target", "deadline"]

DEADLINE_SHARE = 0.8
"""Share of the rollouts after which the deadline is set."""
DEADLINE_FACTOR = 1.5
"""The deadline, in multiples of the seconds that this share took."""


@config(frozen=True, kw_only=True)
class OversampleConfig:
    """Start more than is needed and stop when there is enough; by default, wait for exactly what was asked for.

    A group is whole when it has all of its scored rollouts; only whole groups are kept, so that no baseline bends.
    """

    extra_groups: Count = 0
    """Groups in play beyond those that are wanted."""
    extra_rollouts: Count = 0
    """Rollouts in each group beyond its size; the first to be scored are kept."""
    stop: StopRule = "all"
    """all: wait for every rollout; target: stop when the wanted groups are whole; deadline: also stop at 1.5 times the
    time after which 80 % of the rollouts were done."""
    carry: Count = 0
    """What is cut goes on under the next policies: how many versions older than that policy a group's oldest token may
    be when the group is trained on. A group that has come to that age is waited for. 0: what is cut is dropped."""
    replace: Count = 0
    """Groups without signal (equal scores) that one batch replaces by others, at most."""

    def __post_init__(self) -> None:
        for name in ("extra_groups", "extra_rollouts", "carry"):
            if self.stop == "all" and getattr(self, name):
                raise ValueError(f"{name}: with stop='all' nothing is cut; use stop='target' or 'deadline'")
        if self.stop == "target" and not (self.extra_groups or self.extra_rollouts):
            raise ValueError("stop: 'target' needs extra_groups or extra_rollouts, or it stops where 'all' does")

    @property
    def crosses_batches(self) -> bool:
        """Whether a process may play, for one batch, tasks beyond its share of that batch."""
        return bool(self.extra_groups or self.carry or self.replace)

    def fits(self, *, group_size: int, max_staleness: int) -> None:
        """Raise ValueError, naming the field, where these settings mean nothing beside the run's."""
        if self.replace and group_size < 2:
            raise ValueError(f"replace: a group of {group_size} never has a signal")
        if max_staleness < 0:
            raise ValueError(f"max_staleness: must not be negative, got {max_staleness}")
        if not max_staleness:
            return
        if self.extra_groups:
            raise ValueError("extra_groups: with staleness the next batches' groups are in play already")
        if self.carry:
            raise ValueError("carry: with staleness everything is carried, to that bound")
        if self.stop == "deadline":
            raise ValueError("stop: a deadline cuts rollouts, and with staleness they go on while others train")


def share_of(count: int, share: float) -> int:
    """`count * share`, rounded down; 10 * (1 - .9) is 1, whatever floats make of it."""
    return math.floor(round(count * share, 9))


class Deadline:
    """Passes at `DEADLINE_FACTOR` times the seconds after which `DEADLINE_SHARE` of the rollouts were done."""

    def __init__(self, rollouts: int, passing: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._began, self._passing = self._loop.time(), passing
        self._awaited = share_of(rollouts, DEADLINE_SHARE)
        self._timer: asyncio.TimerHandle | None = None
        self.passed = False

    def ended(self, count: int) -> None:
        """So many more rollouts are done, or will not be needed."""
        self._awaited -= count
        if self._awaited <= 0 and self._timer is None:
            took = self._loop.time() - self._began
            self._timer = self._loop.call_at(self._began + DEADLINE_FACTOR * took, self._pass)

    def cancel(self) -> None:
        """Let it pass no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        self.passed = True
        self._passing.set()


class BatchPolicy:
    """Decides what a run's settings leave open: how many groups are in play, and when which of them are returned.

    No group is returned older than `bound` policy versions; old groups are waited for in time.
    """

    def __init__(self, oversample: OversampleConfig, staleness: int) -> None:
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
        taken = {*self.next_batch(groups, version)}
        versions_left = sorted(self.bound - group.age(version) for group in groups if group not in taken)
        return all(i < versions * self._wanted for i, versions in enumerate(versions_left))
