"""One group while it is played: its jobs, what has come of them, and when it has enough."""

import asyncio
from collections.abc import Callable
from typing import Generic

import numpy as np

from agentgym.environments.env import TaskT
from agentgym.errors import Failure
from agentgym.returns import differ, returns_by_turn
from agentgym.scheduling.gate import RolloutUsage
from agentgym.types import Group, Rollout, StopReason


class GroupState(Generic[TaskT]):
    """The rollouts of one task; complete with `n` scored ones, or when all have ended."""

    def __init__(self, task: TaskT, *, n: int, seed: int, number: int, by_turn: bool = False) -> None:
        self.task, self.n, self.seed = task, n, seed
        self.by_turn = by_turn
        """Whether each turn is credited with what came after it: then turns may differ where totals are equal."""
        self.number = number
        """As how many'th its task was drawn, from 0."""
        self.usages: list[RolloutUsage] = []
        self.ended: dict[int, Rollout] = {}
        """By index, in the order of their ends."""
        self.closed = 0
        """As how many'th of all groups it was closed; 0 while it is open."""
        self._jobs: list[asyncio.Task[None]] = []

    def name(self, index: int) -> str:
        """The id of one of its rollouts."""
        return f"{self.task.id}/{index}"

    def lost(self, index: int, why: str) -> Rollout:
        """What stands for a rollout that ended without a word: a failed one."""
        return Rollout(
            rollout_id=self.name(index),
            group_id=self.task.id,
            segments=(),
            reward=None,
            stop_reason=StopReason.ERROR,
            failure=Failure(type="AgentGymError", message=why),
        )

    def usage(self) -> RolloutUsage:
        """A meter for the next rollout."""
        self.usages.append(RolloutUsage())
        return self.usages[-1]

    def start(self, job: asyncio.Task[None]) -> None:
        """The next rollout is played by this job."""
        self._jobs.append(job)

    @property
    def scored(self) -> list[Rollout]:
        """The ended rollouts that have a score."""
        return [r for r in self.ended.values() if r.reward is not None]

    @property
    def failed(self) -> list[Rollout]:
        """The ended rollouts that have none."""
        return [r for r in self.ended.values() if r.reward is None]

    @property
    def cut(self) -> list[RolloutUsage]:
        """The meters of the rollouts that have not ended."""
        return [usage for index, usage in enumerate(self.usages) if index not in self.ended]

    @property
    def played(self) -> list[RolloutUsage]:
        """The meters of the rollouts that have a score."""
        return [self.usages[index] for index, r in self.ended.items() if r.reward is not None]

    @property
    def unended(self) -> int:
        """How many rollouts have not ended, and may still."""
        return 0 if self.closed else len(self.usages) - len(self.ended)

    @property
    def complete(self) -> bool:
        """Whether it needs no more rollouts, or can have no more."""
        return len(self.scored) >= self.n or len(self.ended) == len(self.usages)

    @property
    def signal(self) -> bool:
        """Whether its scores differ enough to learn from, as `samples` judges it."""
        totals = np.array([[rollout.reward] for rollout in self.scored], np.float64)
        return differ(returns_by_turn(self.scored) if self.by_turn else totals)

    @property
    def busy(self) -> bool:
        """Whether one of its jobs still runs; a cancelled one does while it closes."""
        return any(not job.done() for job in self._jobs)

    def oldest(self, version: int) -> int:
        """No token of the group is older than this; the `version` of now where nothing was sampled."""
        return min((usage.oldest for usage in self.usages if usage.oldest is not None), default=version)

    def oldest_token(self, version: int) -> int:
        """The version of its oldest token."""
        segments = [segment for r in self.scored for segment in r.segments]
        return min((v.version for s in segments for turn in s.turns for v in turn.versions), default=version)

    def close(self, number: int, drop: Callable[[RolloutUsage], None]) -> None:
        """Nothing more comes in: further rollouts are cancelled."""
        self.cancel(drop)
        self.closed = number

    def cancel(self, drop: Callable[[RolloutUsage], None]) -> None:
        """Cancel the jobs that have not ended: each gives its request, its tools and its box back."""
        running = asyncio.current_task()
        for index, job in enumerate(self._jobs):
            if index not in self.ended and job is not running and not self.usages[index].dropped:
                drop(self.usages[index])
                job.cancel()

    def finished(self) -> Group:
        """The group as it is trained on, rollouts in the order of their index."""
        rollouts = tuple(self.ended[index] for index in sorted(self.ended))
        return Group(group_id=self.task.id, rollouts=rollouts, task=self.task)
