"""The rollouts of every training process, collected as one batch."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from agentgym.boxes import Boxes
from agentgym.engines.base import Engine
from agentgym.environments.env import Env
from agentgym.environments.task_rows import as_tasks
from agentgym.run.evaluation import Evaluation
from agentgym.scheduling.accounting import BatchStats, raise_if_all_failed
from agentgym.scheduling.group_state import GroupSettings
from agentgym.scheduling.oversampling import Oversample
from agentgym.scheduling.run_groups import Groups, play_groups
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from agentgym.types import Sampling

if TYPE_CHECKING:  # torch is loaded when a run begins: a command line asks for help, or is stopped, before
    from agentgym.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Collector:
    """What rollouts are played with; under torchrun each process has one, and plays its share."""

    env: type[Env[Any]]
    engine: Engine
    trainer: "Trainer"
    boxes: Boxes | None
    sampling: Sampling
    concurrency: int = 64
    """Rollouts at once, in this process."""

    async def collect(self, tasks: Sequence[Any], *, n: int, seed: int) -> Groups:
        """`n` rollouts of every task, shared out over the trainer's processes; every process gets all of them."""
        mine = tasks[self.trainer.rank :: self.trainer.world]
        groups = await play_groups(
            self.env,
            mine,
            self.engine,
            n=n,
            boxes=self.boxes,
            concurrency=self.concurrency,
            sampling=self.sampling,
            seed=seed,
        )
        found = {group.group_id: group for group in self.trainer.gather(list(groups))}
        whole = Groups([found[task.id] for task in tasks])
        raise_if_all_failed(whole)
        return whole

    @asynccontextmanager
    async def schedule(
        self,
        prompts: int,
        *,
        n: int,
        oversample: Oversample | None = None,
        staleness: int = 0,
        seed: int = 0,
        sampler_states: Sequence[Mapping[str, Any]] = (),
        by_turn: bool = False,
    ) -> AsyncIterator["DistributedScheduler"]:
        """Training batches of `prompts` groups of `n`, one `collect` after the other; see `Scheduler`.

        `sampler_states` are what `DistributedScheduler.sampler_states` gave in a run that was stopped: this one goes on
        from there. Raises ValueError, naming the field, where they are wrong or of another run.
        """
        sharding = Sharding(
            prompts=prompts,
            rank=self.trainer.rank,
            world=self.trainer.world,
            by_id=staleness > 0 or (oversample is not None and oversample.carry > 0),
        )
        sampler: TaskSampler[Any] = TaskSampler.for_training(self.env, sharding, seed=seed)
        if sampler_states:
            sampler.load_state_dict(sampler_states)
        settings = GroupSettings(n=n, concurrency=self.concurrency, sampling=self.sampling, seed=seed, by_turn=by_turn)
        async with Scheduler(
            self.env, sampler, self.engine, settings, oversample=oversample, staleness=staleness, boxes=self.boxes
        ) as scheduler:
            yield DistributedScheduler(scheduler, self.trainer, wanted=sharding.share)

    async def evaluate(self, count: int) -> float:
        """Mean reward over the first `count` held-out tasks, one rollout each."""
        groups = await self.collect(as_tasks(self.env, self.env.tasks("test"))[:count], n=1, seed=0)
        return Evaluation(groups=groups, k=1).reward


@dataclass(frozen=True, slots=True)
class DistributedScheduler:
    """The scheduler of each process as one."""

    scheduler: Scheduler[Any]
    trainer: "Trainer"
    wanted: int
    """Groups that this process plays for a batch."""

    async def collect(self, *, to_come: int | None = None) -> Groups:
        """The next batch; every process gets all of its groups, in the order of their tasks."""
        mine = await self.scheduler.collect(self.wanted, to_come=to_come) if self.wanted else Groups([])
        shares = self.trainer.gather([(mine.groups, mine.batch_stats)])
        rows = zip_longest(*(groups for groups, _ in shares))
        batch_stats_of_ranks = [batch_stats for _, batch_stats in shares if batch_stats is not None]
        whole = Groups(
            [group for row in rows for group in row if group is not None], sum(batch_stats_of_ranks, start=BatchStats())
        )
        raise_if_all_failed(whole)
        return whole

    def sampler_states(self) -> list[dict[str, Any]]:
        """The state of every process's sampler, by rank, on every process; between two batches."""
        return list(self.trainer.gather([self.scheduler.state_dict()]))
