"""The rollouts of all training processes, collected as one batch."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
from agentgym.sandboxes.protocol import Boxes
from agentgym.scheduling.accounting import BatchStats, raise_if_all_failed
from agentgym.scheduling.group_state import GroupSettings
from agentgym.scheduling.oversampling import Oversample
from agentgym.scheduling.run_groups import Groups, play_groups
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from agentgym.store.vocabulary import TokenBytes
from agentgym.tools.tool_threads import in_own_thread
from agentgym.types.branching import Branching
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group, Rollout

PlayedShare: TypeAlias = tuple[Sequence[Group], BatchStats | None]
"""The groups of a batch that one process played, in the order of their tasks, and their account."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Plays rollouts with an env, an engine and boxes; under torchrun each process has one, and plays its share."""

    env: type[Env[Any]]
    engine: Engine
    peers: Peers
    """The processes that play with this one, such as those of an open `Trainer`."""
    boxes: Boxes | None
    sampling: Sampling
    concurrency: int = 64
    """The most rollouts that this process plays at once."""
    models: Mapping[str, Engine] = field(default_factory=dict)
    """What the env asks by name."""

    async def collect(
        self,
        tasks: Sequence[Any],
        *,
        n: int,
        seed: int,
        same_instance: bool = True,
        must_score: bool = True,
        sampling: Sampling | None = None,
    ) -> Groups:
        """Play `n` rollouts of every task, shared out over the processes; every process gets all of them.

        The rollouts of a task share the seed that their env gets; without `same_instance` each is an attempt of an
        evaluation, with one of its own. `sampling` takes the place of the collector's own. Raises AgentGymError where
        all of them failed, unless `must_score` is False.
        """
        mine = tasks[self.peers.rank :: self.peers.world]
        groups = await play_groups(
            self.env,
            mine,
            self.engine,
            n=n,
            boxes=self.boxes,
            concurrency=self.concurrency,
            sampling=sampling or self.sampling,
            seed=seed,
            same_instance=same_instance,
            models=self.models,
        )
        found = {group.group_id: group for group in await self.peers.gather(list(groups))}
        whole = Groups([found[task.id] for task in tasks])
        if must_score:
            raise_if_all_failed(whole)
        return whole

    def token_bytes(self) -> TokenBytes:
        """Return a function that gives the bytes of token ids of a named model, "" for the policy."""
        return bytes_by_model(self.engine, self.models)

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
        alone: bool = False,
        by_turn: bool = False,
        rest_rounds: int = 0,
        solved: float = 1.0,
        branching: Branching | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> AsyncIterator["DistributedScheduler"]:
        """Open a scheduler whose every `collect` gives a batch of `prompts` groups of `n`; see `Scheduler`.

        `sampler_states` are what `DistributedScheduler.sampler_states` gave in a run that was stopped: this one goes on
        from there; with `alone` this process was lost, and the others go on. A task that taught nothing is passed over
        the next `rest_rounds` times, and counts as solved with rewards of at least `solved`. With `branching`, rollouts
        are played on from some of their states. Raises ValueError, naming the field, where the states are wrong or of
        another run, and where the sampling is from a part of the distribution, which cannot be trained on.
        """
        if not self.sampling.whole:
            raise ValueError(f"sampling: {WHOLE}")
        sharding = Sharding(
            prompts=prompts,
            rank=self.peers.rank,
            world=self.peers.world,
            by_id=staleness > 0 or rest_rounds > 0 or (oversample is not None and oversample.crosses_batches),
        )
        sampler: TaskSampler[Any] = TaskSampler.for_training(self.env, sharding, seed=seed, rest_rounds=rest_rounds)
        if sampler_states:
            sampler.load_state_dict(sampler_states, alone=alone)
        settings = GroupSettings(
            n=n,
            concurrency=self.concurrency,
            sampling=self.sampling,
            seed=seed,
            by_turn=by_turn,
            solved=solved,
            branching=branching,
        )
        async with Scheduler(
            self.env,
            sampler,
            self.engine,
            settings,
            oversample=oversample,
            staleness=staleness,
            boxes=self.boxes,
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
        given: dict[str, Any] = {"must_score": must_score, "sampling": sampling}
        groups = await self.collect(tasks, n=n, seed=seed, same_instance=False, **given)
        return Evaluation(groups=groups, k=n, envs=envs, seed=seed)


@dataclass(frozen=True, slots=True)
class DistributedScheduler:
    """Joins the schedulers of all processes into one."""

    scheduler: Scheduler[Any]
    peers: Peers
    wanted: int
    """How many groups of a batch this process plays."""

    async def collect(self, *, to_come: int | None = None, must_score: bool = True) -> Groups:
        """Play the next batch; every process gets all of its groups, in the order of their tasks.

        Raises AgentGymError where all rollouts failed, unless `must_score` is False.
        """
        whole = joined(await self.peers.gather([await self.play_share(to_come=to_come)]))
        if must_score:
            raise_if_all_failed(whole)
        return whole

    async def play_share(self, *, to_come: int | None = None) -> PlayedShare:
        """Play this process's share of the next batch."""
        mine = await self.scheduler.collect(self.wanted, to_come=to_come) if self.wanted else Groups([])
        return mine.groups, mine.batch_stats

    async def sampler_states(self) -> list[dict[str, Any]]:
        """The state of every process's sampler, by rank, on every process; between two batches."""
        return list(await self.peers.gather([self.scheduler.state_dict()]))


def joined(shares: Iterable[PlayedShare]) -> Groups:
    """Join the shares of all processes, by rank, to one batch in the order of its tasks."""
    known = list(shares)
    rows = zip_longest(*(groups for groups, _ in known))
    stats = [of_one for _, of_one in known if of_one is not None]
    return Groups([group for row in rows for group in row if group is not None], sum(stats, start=BatchStats()))
