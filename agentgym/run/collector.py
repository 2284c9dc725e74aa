"""Collection of rollouts from all training processes into one batch."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeAlias

from agentgym.engines.base import Engine
from agentgym.engines.token_bytes import bytes_by_model
from agentgym.environments.env import Env
from agentgym.environments.env_version import env_versions
from agentgym.environments.task_rows import first_tasks, split_tasks
from agentgym.evals.evaluation import Evaluation
from agentgym.run.config import WHOLE
from agentgym.run.peers import Peers
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling.accounting import BatchStats, raise_if_all_failed
from agentgym.scheduling.run_groups import Groups, play_groups
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from agentgym.store.vocabulary import TokenBytes
from agentgym.tools.tool_threads import in_own_thread
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group, Rollout

PlayedShare: TypeAlias = tuple[Sequence[Group], BatchStats | None]
"""One process's share of a batch: the groups that it ran, in task order, and their statistics or None."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Runs rollouts with an env, an engine and sandboxes.

    Under torchrun, each process has its own collector, which runs the process's share of the rollouts.
    """

    env: type[Env[Any]]
    engine: Engine
    peers: Peers
    """The processes that share the rollouts with this one, such as those of an open `Trainer`."""
    sandboxes: SandboxPool | None
    sampling: Sampling
    concurrency: int = 64
    """Maximum number of rollouts that this process runs at once."""
    models: Mapping[str, Engine] = field(default_factory=dict)
    """Engines of the env's model roles, by name."""

    async def collect(self, tasks: Sequence[Any], schedule: Schedule, *, must_score: bool = True) -> Groups:
        """Run a group of every task, split across the processes, and return all groups on every process.

        Args:
            tasks: The tasks, in the order of the returned groups.
            schedule: Group size, seed and other settings. Its `sampling` and `concurrency` default to the
                collector's.
            must_score: Whether to raise if every rollout failed.

        Raises:
            AgentGymError: If all rollouts failed and `must_score` is true.
        """
        found = {group.group_id: group for group in await self._played(tasks, schedule)}
        whole = Groups([found[task.id] for task in tasks])
        if must_score:
            raise_if_all_failed(whole)
        return whole

    async def _played(self, tasks: Sequence[Any], schedule: Schedule) -> Iterable[Group]:
        """Run the groups of these tasks on all processes."""
        mine, schedule = tasks[self.peers.rank :: self.peers.world], self._completed(schedule)
        groups = await play_groups(self.env, mine, self.engine, schedule, sandboxes=self.sandboxes, models=self.models)
        return await self.peers.gather(list(groups))

    def _completed(self, schedule: Schedule) -> Schedule:
        """Return the schedule, with the collector's sampling settings and concurrency if the schedule sets none."""
        sampling, concurrency = schedule.sampling or self.sampling, schedule.concurrency or self.concurrency
        return replace(schedule, sampling=sampling, concurrency=concurrency)

    def token_bytes(self) -> TokenBytes:
        """Return a function that maps a model role ("" for the policy) and token ids to the tokens' bytes."""
        return bytes_by_model(self.engine, self.models)

    @asynccontextmanager
    async def schedule(
        self,
        schedule: Schedule,
        sampler_states: Sequence[Mapping[str, Any]] = (),
        *,
        alone: bool = False,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> AsyncIterator["BatchScheduler"]:
        """Open a scheduler whose `collect` returns batches of the env's training tasks; see `Scheduler`.

        Args:
            schedule: What to run. Its `sampling` and `concurrency` default to the collector's.
            sampler_states: The result of `sampler_states()` in a stopped run, from which this scheduler resumes.
                Empty for a new run.
            alone: Whether only this process resumes, because it was lost while the other processes kept running.
            on_rollout: Called with each rollout of this process when it ends.

        Yields:
            The scheduler.

        Raises:
            ValueError: If the states are malformed or belong to another run, or if the sampling truncates the
                distribution, which can't be trained on. The message names the field.
        """
        schedule = self._completed(schedule)
        if schedule.sampling is not None and not schedule.sampling.whole:
            raise ValueError(f"sampling: {WHOLE}")
        sharding = Sharding(
            prompts=schedule.prompts_per_step, rank=self.peers.rank, world=self.peers.world, by_id=schedule.by_id
        )
        sampler: TaskSampler[Any] = TaskSampler.for_training(
            self.env, sharding, seed=schedule.seed, rest_epochs=schedule.rest_epochs
        )
        if sampler_states:
            sampler.load_state_dict(sampler_states, alone=alone)
        async with Scheduler(
            self.env,
            sampler,
            self.engine,
            schedule,
            sandboxes=self.sandboxes,
            on_rollout=on_rollout,
            models=self.models,
        ) as scheduler:
            yield DistributedScheduler(scheduler, self.peers, wanted=sharding.share)

    async def evaluate(
        self, count: int, *, n: int = 1, seed: int = 0, must_score: bool = True, sampling: Sampling | None = None
    ) -> Evaluation:
        """Evaluate the first `count` held-out tasks.

        `ag.evaluate` with the same seed runs the same attempts.

        Args:
            count: Number of tasks.
            n: Attempts per task.
            seed: Seed of the attempts.
            must_score: Whether to raise if every rollout failed.
            sampling: Sampling settings; None uses the collector's.

        Raises:
            AgentGymError: If all rollouts failed and `must_score` is true.
        """
        tasks = first_tasks(split_tasks(self.env, "test"), count)
        envs = await in_own_thread(lambda: env_versions(self.env), name="agentgym-versions")
        schedule = Schedule(group_size=n, seed=seed, same_instance=False, sampling=sampling)
        groups = await self.collect(tasks, schedule, must_score=must_score)
        return Evaluation(groups=groups, k=n, envs=envs, seed=seed)


class BatchScheduler(ABC):
    """Runs a training run's batches; every process runs its share of each."""

    async def collect(self, *, to_come: int | None = None, must_score: bool = True) -> Groups:
        """Run the next batch and return all of its groups on every process, in task order.

        Args:
            to_come: Number of batches that will follow; None if unknown.
            must_score: Whether to raise if every rollout failed.

        Raises:
            AgentGymError: If all rollouts failed and `must_score` is true.
        """
        whole = joined(await self.play(to_come))
        if must_score:
            raise_if_all_failed(whole)
        return whole

    @abstractmethod
    async def play(self, to_come: int | None) -> Sequence[PlayedShare]:
        """Run the next batch.

        Args:
            to_come: As in `collect`.

        Returns:
            Every process's share, in rank order.
        """

    @abstractmethod
    async def sampler_states(self) -> list[dict[str, Any]]:
        """Return every process's sampler state, in rank order, on every process. Call it between batches."""


@dataclass(frozen=True, slots=True)
class DistributedScheduler(BatchScheduler):
    """Runs this process's share of each batch; the other processes run theirs."""

    scheduler: Scheduler[Any]
    peers: Peers
    wanted: int
    """Number of groups per batch that this process runs."""

    async def play(self, to_come: int | None) -> Sequence[PlayedShare]:
        mine = await self.scheduler.collect(self.wanted, to_come=to_come) if self.wanted else Groups([])
        return await self.peers.gather([(mine.groups, mine.batch_stats)])

    async def sampler_states(self) -> list[dict[str, Any]]:
        return await self.peers.gather([self.scheduler.state_dict()])


def joined(shares: Iterable[PlayedShare]) -> Groups:
    """Join the shares of all processes, given in rank order, into one batch in task order."""
    known = list(shares)
    rows = zip_longest(*(groups for groups, _ in known))
    stats = [of_one for _, of_one in known if of_one is not None]
    return Groups([group for row in rows for group in row if group is not None], sum(stats, start=BatchStats()))
