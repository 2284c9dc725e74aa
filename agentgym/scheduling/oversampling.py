"""Oversampling of rollouts: how many are started, when a batch is complete, and which ones are part of it."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from agentgym.config_fields import Count, config
from agentgym.scheduling.group_state import GroupState

GroupT = TypeVar("GroupT", bound=GroupState[Any])

StopRule: TypeAlias = Literal["all", "target", "deadline"]

DEADLINE_SHARE = 0.8
"""Share of the rollouts that must be done before the deadline is set."""
DEADLINE_FACTOR = 1.5
"""The deadline, as a multiple of the time in which `DEADLINE_SHARE` of the rollouts were done."""


@config(frozen=True, kw_only=True)
class OversampleConfig:
    """Settings for starting more rollouts than needed; by default, exactly those requested are started and awaited.

    A group of size n is complete as soon as n of its rollouts have a reward, or when all its rollouts have ended. Only
    complete groups are used, so that no baseline is biased.
    """

    extra_groups: Count = 0
    """Number of groups in progress in addition to the requested ones."""
    extra_rollouts: Count = 0
    """Number of rollouts per group in addition to its size; the first ones to be scored are used."""
    stop: StopRule = "all"
    """all: wait for every rollout. target: stop when the requested groups are complete. deadline: also stop at 1.5
    times the time after which 80 % of the rollouts were done.
    """
    carry: Count = 0
    """Maximum age, in policy versions, of a carried-over group's oldest token when the group is trained on; 0 carries
    no group over. Carrying over means that a group which is unfinished when its batch ends continues in the next
    batches, under their newer policies. A batch waits for each group that has reached the maximum.
    """
    replace: Count = 0
    """Maximum number of groups without signal (equal scores) that one batch replaces."""

    def __post_init__(self) -> None:
        for name in ("extra_groups", "extra_rollouts", "carry"):
            if self.stop == "all" and getattr(self, name):
                raise ValueError(f"{name}: has no effect with stop='all'; use stop='target' or 'deadline'")
        if self.stop == "target" and not (self.extra_groups or self.extra_rollouts):
            raise ValueError(
                "stop: 'target' needs extra_groups or extra_rollouts; without them it is the same as 'all'"
            )

    @property
    def crosses_batches(self) -> bool:
        """Whether a process may run tasks beyond its share of a batch."""
        return bool(self.extra_groups or self.carry or self.replace)

    def fits(self, *, group_size: int, max_staleness: int) -> None:
        """Raise a ValueError that names the field if these settings have no effect in combination with the run's."""
        if self.replace and group_size < 2:
            raise ValueError(f"replace: a group of {group_size} rollout never has a signal; use larger groups")
        if max_staleness < 0:
            raise ValueError(f"max_staleness: must not be negative, got {max_staleness}")
        if not max_staleness:
            return
        if self.extra_groups:
            raise ValueError(
                "extra_groups: has no effect with max_staleness, since groups of the next batches already run"
            )
        if self.carry:
            raise ValueError(
                "carry: has no effect with max_staleness, which already carries over groups up to that age"
            )
        if self.stop == "deadline":
            raise ValueError(
                "stop: 'deadline' cuts rollouts, but with max_staleness they continue during training; use another stop"
            )


def share_of(count: int, share: float) -> int:
    """Return `count * share` rounded down, correcting for float errors: 10 * (1 - .9) is 1."""
    return math.floor(round(count * share, 9))


class Deadline:
    """Expires at `DEADLINE_FACTOR` times the time after which `DEADLINE_SHARE` of the rollouts were done.

    The event `passing` is then set.
    """

    def __init__(self, rollouts: int, passing: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._began, self._passing = self._loop.time(), passing
        self._awaited = share_of(rollouts, DEADLINE_SHARE)
        self._timer: asyncio.TimerHandle | None = None
        self.passed = False

    def ended(self, count: int) -> None:
        """Record that `count` more rollouts are done or won't be needed."""
        self._awaited -= count
        if self._awaited <= 0 and self._timer is None:
            took = self._loop.time() - self._began
            self._timer = self._loop.call_at(self._began + DEADLINE_FACTOR * took, self._pass)

    def cancel(self) -> None:
        """Cancel the deadline."""
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        self.passed = True
        self._passing.set()


class BatchPolicy:
    """Decides how many groups are in progress, which groups form a batch, and when, according to a run's settings.

    No returned group is older than `bound` policy versions: a batch waits for groups that would otherwise exceed it.
    """

    def __init__(self, oversample: OversampleConfig, staleness: int) -> None:
        self.bound = staleness or oversample.carry
        """Maximum age, in policy versions, of a returned group's oldest token; 0 carries nothing over."""
        self.overlaps = staleness > 0
        """Whether rollouts continue while a batch is trained on."""
        self.extra_rollouts = oversample.extra_rollouts
        """Number of rollouts per group in addition to its size."""
        self.target = 0
        """Number of groups to have in progress."""
        self._oversample, self._staleness = oversample, staleness
        self._wanted = self._ahead = 0
        self._deadline: Deadline | None = None

    def begin(self, wanted: int, to_come: int | None) -> None:
        """Start a batch of `wanted` groups, followed by `to_come` batches (None: an unknown number)."""
        self._wanted = wanted
        self._ahead = wanted * (self._staleness if to_come is None else min(self._staleness, to_come))
        self.target = wanted + self._ahead + self._oversample.extra_groups

    def set_deadline(self, rollouts: int, passing: asyncio.Event) -> None:
        """Start the deadline of the batch, if the settings have one. When it expires, the event `passing` is set.

        `rollouts` is the number of rollouts from which `DEADLINE_SHARE` is computed.
        """
        if self._oversample.stop == "deadline":
            self._deadline = Deadline(rollouts, passing)

    def rollouts_ended(self, count: int) -> None:
        """Record that `count` more rollouts are done or won't be needed."""
        if self._deadline is not None:
            self._deadline.ended(count)

    def end(self) -> None:
        """End the wait for the batch, and cancel its deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def play_ahead(self) -> None:
        """From now on, keep only as many groups in progress as the batches after this one need."""
        self.target = self._ahead

    def replaces(self, group: GroupState[Any], replaced: int) -> bool:
        """Return whether a closed group is to be replaced because it has no signal.

        `replaced` is the number of groups of this batch that were replaced before.
        """
        return not group.signal and replaced < self._oversample.replace

    def too_old(self, groups: Iterable[GroupT], version: int) -> list[GroupT]:
        """Return the groups that are more than `bound` policy versions old, which must not be returned."""
        return [group for group in groups if group.age(version) > self.bound]

    def enough(self, groups: Sequence[GroupT], version: int) -> bool:
        """Return whether the batch can end now.

        It can if all groups are closed. It also can if `wanted` groups (see `begin`) are closed, or one after the
        deadline, and the remaining groups can still be returned before they are older than `bound`.
        """
        ready = sum(group.closed > 0 for group in groups)
        if ready == len(groups):
            return True
        late = self._deadline is not None and self._deadline.passed
        if ready < self._wanted and not (late and ready):
            return False
        return not self.bound or self._rest_in_time(groups, version)

    def next_batch(self, groups: Iterable[GroupT], version: int) -> list[GroupT]:
        """Return the closed groups for the next batch: the oldest first, and among those the earliest closed first.

        The batch has `wanted` groups (see `begin`), or all groups whose age has reached `bound` if those are more.
        """
        ready = sorted((g for g in groups if g.closed), key=lambda g: (-g.age(version), g.closed))
        due = sum(self.bound > 0 and group.age(version) >= self.bound for group in ready)
        return ready[: max(self._wanted, due)]

    def _rest_in_time(self, groups: Sequence[GroupT], version: int) -> bool:
        """Return whether all groups that aren't in the next batch can be returned before they exceed `bound`.

        At each policy version, one batch of `wanted` of these groups (see `begin`) can be returned.
        """
        taken = {*self.next_batch(groups, version)}
        versions_left = sorted(self.bound - group.age(version) for group in groups if group not in taken)
        return all(i < versions * self._wanted for i, versions in enumerate(versions_left))
