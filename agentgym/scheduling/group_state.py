"""The state of one running group of rollouts."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic

from agentgym.advantages.group import has_signal
from agentgym.environments.env import TaskT
from agentgym.errors import Failure
from agentgym.scheduling.gate import RolloutUsage
from agentgym.seeds import seed_for
from agentgym.types.rollout import Group, Rollout, StopReason
from agentgym.types.task import Task

CANCELLED = "its task was cancelled from outside"
"""The failure of a rollout whose asyncio task was cancelled by the env's code or other code outside of agentgym."""


def attempt_seed(seed: int, rollout_id: str) -> int:
    """Return the seed of one rollout of an evaluation, derived from the evaluation's seed."""
    return seed_for("attempt", seed, rollout_id)


def failed_rollout(task: Task, rollout_id: str, why: str) -> Rollout:
    """Return a failed rollout in place of one that ended without a result."""
    return Rollout(
        rollout_id=rollout_id,
        group_id=task.id,
        segments=(),
        reward=None,
        stop_reason=StopReason.ERROR,
        failure=Failure(type="AgentGymError", message=why),
    )


class GroupState(Generic[TaskT]):
    """The rollouts of one task, of which `n` are needed.

    The group is complete as soon as `n` rollouts have a score, or when all started ones have ended.
    """

    def __init__(
        self,
        task: TaskT,
        *,
        n: int,
        seed: int,
        number: int,
        order: str = "",
        by_turn: bool = False,
    ) -> None:
        self.task, self.n, self.seed = task, n, seed
        self.by_turn = by_turn
        """Whether each turn is credited with the rewards after it; the group may then have a signal even if all of its
        rollouts have the same total reward.
        """
        self.number = number
        """The position of the group's task in the run's order of tasks."""
        self.order = order
        """The name of that order; "" if positions mean nothing outside this `TaskSampler`."""
        self.usages: list[RolloutUsage] = []
        """The usage of each rollout, by index."""
        self.ended: dict[int, Rollout] = {}
        """The ended rollouts by index, in the order in which they ended."""
        self.closed = 0
        """Position of the group in the order in which groups were closed, from 1; 0 while it is open."""
        self._oldest: dict[int, int | None] = {}
        """The policy version of each ended rollout's oldest token; None if it has no tokens."""
        self._scored: tuple[int, list[Rollout]] = (0, [])
        """The cache of `scored`: the number of ended rollouts when the list was made, and the list."""
        self._finished: tuple[int, Group] | None = None
        """The cache of `finished()`: the number of ended rollouts when the group was created, and the group."""
        self._jobs: list[asyncio.Task[None]] = []
        self._judging: asyncio.Task[None] | None = None

    def name(self, index: int) -> str:
        """Return the id of one of the group's rollouts."""
        return f"{self.task.id}/{index}"

    def failed_rollout(self, index: int, why: str) -> Rollout:
        """Return a failed rollout in place of one that ended without a result."""
        return failed_rollout(self.task, self.name(index), why)

    def usage(self) -> RolloutUsage:
        """Add the usage record of the next rollout and return it."""
        self.usages.append(RolloutUsage())
        return self.usages[-1]

    def start(self, job: asyncio.Task[None]) -> None:
        """Add the job of the next rollout, which is the asyncio task that runs it."""
        self._jobs.append(job)

    def end(self, index: int, done: Rollout) -> None:
        """Add an ended rollout, and compute what the batch's stats need from it."""
        self.ended[index] = done
        self._oldest[index] = _oldest_token(done)

    def judge(self, job: asyncio.Task[None], drop: Callable[[RolloutUsage], None]) -> None:
        """Accept no more rollouts, cancel those in progress, and store the job that computes the group rewards.

        `drop` is called with the usage record of each cancelled rollout.
        """
        self.cancel(drop)
        self._judging = job

    def judged(self, rollouts: Sequence[Rollout]) -> None:
        """Replace the scored rollouts with those that have group rewards."""
        by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        self.ended = {index: by_id.get(rollout.rollout_id, rollout) for index, rollout in self.ended.items()}
        self._scored, self._finished = (0, []), None

    @property
    def scored(self) -> list[Rollout]:
        """The ended rollouts that have a score, in the order of their index."""
        if self._scored[0] != len(self.ended):
            found = [self.ended[index] for index in sorted(self.ended) if self.ended[index].reward is not None]
            self._scored = len(self.ended), found
        return self._scored[1]

    @property
    def failed(self) -> list[Rollout]:
        """The ended rollouts without a score."""
        return [r for r in self.ended.values() if r.reward is None]

    @property
    def cut(self) -> list[RolloutUsage]:
        """The usage records of rollouts that have not ended; once the group is closed, these were cut."""
        return [usage for index, usage in enumerate(self.usages) if index not in self.ended]

    @property
    def played(self) -> list[RolloutUsage]:
        """The usage records of rollouts that have a score."""
        return [self.usages[index] for index, r in self.ended.items() if r.reward is not None]

    @property
    def unended(self) -> int:
        """Number of rollouts that have not ended yet; 0 once the group is closed, which cancels them."""
        return 0 if self.closed else len(self.usages) - len(self.ended)

    @property
    def complete(self) -> bool:
        """Whether the group has enough scored rollouts, or all of its started rollouts have ended."""
        return len(self.scored) >= self.n or len(self.ended) == len(self.usages)

    @property
    def signal(self) -> bool:
        """Whether the group's rewards differ enough to learn from, by the criterion of `build_samples`."""
        return has_signal(self.scored, by_turn=self.by_turn)

    def solved(self, least: float) -> bool:
        """Return whether all scored rollouts have a reward of at least `least`."""
        return all(r.reward is not None and r.reward >= least for r in self.scored)

    @property
    def busy(self) -> bool:
        """Whether a job of the group still runs; a cancelled job runs until its rollout's env is closed."""
        return bool(self.running)

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """The group's jobs that still run."""
        jobs = self._jobs if self._judging is None else [*self._jobs, self._judging]
        return [job for job in jobs if not job.done()]

    def oldest(self, version: int) -> int:
        """Return the lowest policy version that a token of the group may have.

        This is the version at the earliest request of its rollouts, or the current `version` before the first
        request.
        """
        return min((usage.oldest for usage in self.usages if usage.oldest is not None), default=version)

    def age(self, version: int) -> int:
        """Return the highest age, in policy versions, that a token of the group may have at this `version`."""
        return version - self.oldest(version)

    def oldest_token(self, version: int) -> int:
        """Return the policy version of the oldest token in the scored rollouts, or `version` if they have none."""
        oldest = [self._oldest[index] for index, done in self.ended.items() if done.reward is not None]
        return min((each for each in oldest if each is not None), default=version)

    def close(self, number: int, drop: Callable[[RolloutUsage], None]) -> None:
        """Accept no more rollouts, and cancel those in progress.

        `number` is the group's position in the order in which groups are closed, from 1. `drop` is called with the
        usage record of each cancelled rollout.
        """
        self.cancel(drop)
        self.closed = number
        self.finished()  # Create the group here: doing it for all groups of a batch at once would block the event loop.

    def cancel(self, drop: Callable[[RolloutUsage], None]) -> None:
        """Cancel the jobs that have not ended; each releases its request, its tools and its sandbox.

        `drop` is called with the usage record of each cancelled rollout.
        """
        running = asyncio.current_task()
        for index, job in enumerate(self._jobs):
            if index not in self.ended and job is not running and not self.usages[index].dropped:
                drop(self.usages[index])
                job.cancel()
        if self._judging is not None and self._judging is not running:
            self._judging.cancel()

    def finished(self) -> Group:
        """Return the group for training, with its rollouts in the order of their index."""
        if self._finished is None or self._finished[0] != len(self.ended):
            rollouts = tuple(self.ended[index] for index in sorted(self.ended))
            place = (self.order, self.number) if self.order else None
            made = Group(group_id=self.task.id, rollouts=rollouts, task=self.task, place=place)
            self._finished = len(self.ended), made
        return self._finished[1]


def _oldest_token(done: Rollout) -> int | None:
    """Return the policy version of a rollout's oldest token, or None if the policy sampled none."""
    spans = {turn.versions for segment in done.segments if not segment.model for turn in segment.turns}
    return min((span.version for each in spans for span in each), default=None)
