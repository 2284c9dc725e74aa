"""The rollouts of all training processes, collected as one batch."""

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
"""The groups of a batch that one process played, in the order of their tasks, and their account."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Plays rollouts with an env, an engine and sandboxes; under torchrun each process has one, and plays its share."""

    env: type[Env[Any]]
    engine: Engine
    peers: Peers
    """The processes that play with this one, such as those of an open `Trainer`."""
    sandboxes: SandboxPool | None
    sampling: Sampling
    concurrency: int = 64
    """The most rollouts that this process plays at once."""
    models: Mapping[str, Engine] = field(default_factory=dict)
    """What the env asks by name."""

    async def collect(self, tasks: Sequence[Any], schedule: Schedule, *, must_score: bool = True) -> Groups:
        """Play a group of every task, shared out over the processes; every process gets all of them.

        Raises AgentGymError where all rollouts failed, unless `must_score` is False.
        """
        found = {group.group_id: group for group in await self._played(tasks, schedule)}
        whole = Groups([found[task.id] for task in tasks])
        if must_score:
            raise_if_all_failed(whole)
        return whole

    async def _played(self, tasks: Sequence[Any], schedule: Schedule) -> Iterable[Group]:
        """Play the groups of these tasks, on all processes."""
        mine, schedule = tasks[self.peers.rank :: self.peers.world], self._completed(schedule)
        groups = await play_groups(self.env, mine, self.engine, schedule, sandboxes=self.sandboxes, models=self.models)
        return await self.peers.gather(list(groups))

    def _completed(self, schedule: Schedule) -> Schedule:
        """Return the schedule with what the collector says where it says nothing itself."""
        sampling, concurrency = schedule.sampling or self.sampling, schedule.concurrency or self.concurrency
        return replace(schedule, sampling=sampling, concurrency=concurrency)

    def token_bytes(self) -> TokenBytes:
        """Return a function that gives the bytes of token ids of a model role, "" for the policy."""
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
        """Open a scheduler whose every `collect` gives a batch of the env's training tasks; see `Scheduler`.

        `sampler_states` are what `sampler_states()` gave in a run that was stopped: this one goes on from there; with
        `alone` this process was lost, and the others go on. Raises ValueError, naming the field, where the states are
        wrong or of another run, and where the sampling is from a part of the distribution, which cannot be trained on.
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
        """Play the first `count` held-out tasks, `n` attempts each; with one seed, `ag.evaluate` has the same luck."""
        tasks = first_tasks(split_tasks(self.env, "test"), count)
        envs = await in_own_thread(lambda: env_versions(self.env), name="agentgym-versions")
        schedule = Schedule(group_size=n, seed=seed, same_instance=False, sampling=sampling)
        groups = await self.collect(tasks, schedule, must_score=must_score)
        return Evaluation(groups=groups, k=n, envs=envs, seed=seed)


class BatchScheduler(ABC):
    """Plays the batches of a run, a share of each on every process."""

    async def collect(self, *, to_come: int | None = None, must_score: bool = True) -> Groups:
        """Play the next batch; every process gets all of its groups, in the order of their tasks.

        `to_come` is how many batches will follow, where that is known. Raises AgentGymError where all rollouts failed,
        unless `must_score` is False.
        """
        whole = joined(await self.play(to_come))
        if must_score:
            raise_if_all_failed(whole)
        return whole

    @abstractmethod
    async def play(self, to_come: int | None) -> Sequence[PlayedShare]:
        """Play the next batch, and return its shares in the order of their ranks."""

    @abstractmethod
    async def sampler_states(self) -> list[dict[str, Any]]:
        """The state of every process's sampler, by rank, on every process; between two batches."""


@dataclass(frozen=True, slots=True)
class DistributedScheduler(BatchScheduler):
    """Plays this process's share; the others play theirs."""

    scheduler: Scheduler[Any]
    peers: Peers
    wanted: int
    """How many groups of a batch this process plays."""

    async def play(self, to_come: int | None) -> Sequence[PlayedShare]:
        mine = await self.scheduler.collect(self.wanted, to_come=to_come) if self.wanted else Groups([])
        return await self.peers.gather([(mine.groups, mine.batch_stats)])

    async def sampler_states(self) -> list[dict[str, Any]]:
        return await self.peers.gather([self.scheduler.state_dict()])


def joined(shares: Iterable[PlayedShare]) -> Groups:
    """Join the shares of all processes, by rank, to one batch in the order of its tasks."""
    known = list(shares)
    rows = zip_longest(*(groups for groups, _ in known))
    stats = [of_one for _, of_one in known if of_one is not None]
    return Groups([group for row in rows for group in row if group is not None], sum(stats, start=BatchStats()))
