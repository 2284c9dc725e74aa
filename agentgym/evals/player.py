"""Runs all rollouts of an evaluation, and stores each one when it ends."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from agentgym.evals.kept import KeptRollouts
from agentgym.evals.playing import Playing
from agentgym.scheduling.reward_failures import RewardFailures
from agentgym.types.rollout import Group, Rollout
from agentgym.types.task import Task

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationPlayer:
    """Runs the rollouts of an evaluation, and reports and stores each one when it ends."""

    playing: Playing
    k: int
    judged: Set[str]
    """The ids of the tasks that have group rewards, which are computed once all rollouts of the task have ended."""
    kept: KeptRollouts | None
    told: Callable[[Rollout], None]
    ended: dict[str, Rollout]
    """Every finished rollout by its id."""
    kept_ids: set[str]
    """The ids of the rollouts that are stored in the folder."""
    reward_failures: RewardFailures = field(default_factory=RewardFailures)

    async def play_all(self, left: Sequence[tuple[Task, int]], concurrency: int) -> None:
        """Run the rollouts in `left`, each given as its task and its number, at most `concurrency` at once."""
        jobs = iter(left)
        try:
            async with asyncio.TaskGroup() as players:
                for _ in range(min(concurrency, len(left))):
                    players.create_task(self._play_next(jobs))
        except ExceptionGroup as failed:  # such as a disk error; errors of a rollout are in the rollout
            raise failed.exceptions[0] from None

    async def _play_next(self, jobs: Iterator[tuple[Task, int]]) -> None:
        """Run one rollout after another until no job is left."""
        for task, number in jobs:
            done = await self.playing.play(task, rollout_id(task, number))
            self.ended[done.rollout_id] = done
            if task.id not in self.judged:
                await self._end(task, [done])
            elif all(name in self.ended for name in rollout_ids(task, self.k)):
                await self._end(task, await self._judged(task))

    async def _judged(self, task: Task) -> list[Rollout]:
        """Return all rollouts of a task, with group rewards added to the scored ones."""
        rollouts = [self.ended[name] for name in rollout_ids(task, self.k)]
        scored = [done for done in rollouts if done.reward is not None]
        added = await self.playing.judge(task, scored) if scored else []
        self.ended.update({done.rollout_id: done for done in added})
        return [self.ended[name] for name in rollout_ids(task, self.k)]

    async def _end(self, task: Task, rollouts: Sequence[Rollout]) -> None:
        """Store and report rollouts that have ended."""
        if self.kept is not None:
            await asyncio.to_thread(self.kept.add, task, rollouts)
            self.kept_ids.update(done.rollout_id for done in rollouts)
            names = rollout_ids(task, self.k)
            if self.kept_ids.issuperset(names):
                self.kept.sign(Group(group_id=task.id, rollouts=tuple(self.ended[name] for name in names)))
        for done in rollouts:
            self.told(done)
        for said in self.reward_failures.add(rollouts):
            _LOG.warning("%s", said)


def rollout_ids(task: Task, k: int) -> list[str]:
    """Return the ids of a task's rollouts."""
    return [rollout_id(task, number) for number in range(k)]


def rollout_id(task: Task, number: int) -> str:
    """Return the id of one rollout of a task."""
    return f"{task.id}/{number}"
