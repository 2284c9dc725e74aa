"""The rollout workers as the driver uses them: all engines as one engine, and all schedulers as one scheduler."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.cluster.worker import EngineFacts, Played, Policy
from agentgym.cluster.workers import Workers, answer, together
from agentgym.engines.base import SharedEngine
from agentgym.engines.token_bytes import bytes_of
from agentgym.errors import EngineError
from agentgym.run.collector import BatchScheduler, Collector, PlayedShare, joined
from agentgym.run.peers import Share
from agentgym.scheduling.schedule import Schedule
from agentgym.store.vocabulary import TokenBytes
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling
from agentgym.types.rollout import Group, Rollout
from agentgym.types.weights import Adapter, ModelWeights

SAME = 1e-3
"""Maximum difference, in nats, between the log-probabilities of the same tokens and policy in two workers' engines."""


class WorkerEngines:
    """Combines the engines of all workers into one `Engine`.

    It sends each policy to every worker, and compares the workers' scores. `servers` is the engine with which the
    driver reaches the servers that all workers use; None if each worker has a separate engine in its process.
    """

    def __init__(self, workers: Workers, tokenizer: ChatTokenizer | None, servers: Any | None) -> None:
        self._workers, self._tokenizer, self._servers = workers, tokenizer, servers
        self._version = 0
        self._given: Any = None
        """The current policy: a reference to it in Ray's object store, or the result of pushing it to the servers. None
        for the base model.
        """
        workers.renew_policy = self._renew

    @property
    def tokenizer(self) -> ChatTokenizer:
        if self._tokenizer is None:
            raise EngineError("engine: the tokenizer of the workers' engine cannot be sent to the driver")
        return self._tokenizer

    @property
    def context_tokens(self) -> int:
        return self._facts.context_tokens

    @property
    def dtype(self) -> str:
        """The data type of the engines' weights, such as float32."""
        return self._facts.dtype

    @property
    def model_name(self) -> str:
        """The folder or name of the engines' model."""
        return self._facts.model_name

    @property
    def version(self) -> int:
        return self._version

    @property
    def counts(self) -> Any:
        """The counters of the engine with which the driver reaches the servers; None if there is no such engine."""
        return getattr(self._servers, "counts", None)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        raise EngineError("engine: on Ray, only the workers sample, not the driver")

    async def release(self, session: str) -> None:
        """Do nothing: the driver has no sessions."""

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        """Load an adapter into every worker's engine, or into the servers."""
        await self._load(adapter, version)

    async def load_weights(self, weights: ModelWeights, *, version: int) -> None:
        """Load the weights of a full model into every worker's engine, or into the servers."""
        await self._load(weights, version)

    async def _load(self, policy: Policy, version: int) -> None:
        if self._servers is None:
            self._given = await asyncio.to_thread(ray.put, policy)  # serialized once for all workers
            self._version = version
            await self._workers.ask_all("load", self._given, version)
            return
        servers: SharedEngine = self._servers
        await self._workers.ask_all("hold")
        await servers.hold()
        self._given = await servers.push(policy, version=version)
        self._version = version
        await servers.pull(self._given)
        await self._workers.ask_all("pull", self._given)

    async def _renew(self, rank: int, worker: Any) -> None:
        """Send a new worker the policy that the other workers have."""
        if self._given is None:
            return
        if self._servers is None:
            await answer(worker.load.remote(self._given, self._version))
        else:
            await answer(worker.pull.remote(self._given))

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Return the log-probabilities of these ids under the current policy.

        If each worker has a separate engine, all of them score the ids, and the result of worker 0 is returned.

        Raises:
            EngineError: If a worker's log-probabilities differ from those of worker 0, which means that the two have
                different policies. The message names the worker.
        """
        if self._servers is not None:
            scores: Floats = await self._servers.score(token_ids, sampling=sampling)
            return scores
        found: list[Floats] = await self._workers.ask_all("score", list(token_ids), sampling)
        for rank, other in enumerate(found):
            gap = float(np.abs(other - found[0]).max(initial=0.0))
            if not gap <= SAME:
                raise EngineError(
                    f"engine: the probe scores of worker {rank} differ from those of worker 0 by {gap:.2g} nats"
                )
        return found[0]

    @property
    def _facts(self) -> EngineFacts:
        assert self._workers.facts is not None, "open() comes first"
        return self._workers.facts


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCollector(Collector):
    """A `Collector` that lets the workers run the rollouts."""

    workers: Workers
    world: Callable[[], int]
    """Returns the number of workers to use: the configured number, or else the number that currently fits in the
    cluster.
    """
    tokenizers: Mapping[str, Any]
    """The tokenizers of the workers' models by name, "" for the policy."""

    def token_bytes(self) -> TokenBytes:
        """Return a function that maps a model role ("" for the policy) and token ids to the tokens' bytes."""
        return bytes_of(self.tokenizers)

    async def _played(self, tasks: Sequence[Any], schedule: Schedule) -> Iterable[Group]:
        """Run the groups of these tasks on all workers."""
        world = len(self.workers.handles)
        asked = [(rank, Share(rank, world).of(tasks)) for rank in range(world)]
        shares = await together([self.workers.ask(rank, "play", mine, schedule) for rank, mine in asked])
        return [group for share in shares for group in share]

    @asynccontextmanager
    async def schedule(
        self,
        schedule: Schedule,
        sampler_states: Sequence[Mapping[str, Any]] = (),
        *,
        alone: bool = False,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> AsyncIterator[BatchScheduler]:
        """Open the schedulers of all workers.

        Args:
            schedule: The schedule of the rollouts.
            sampler_states: The states of the samplers to continue from, one per process of the stopped run.
            alone: Ignored: the driver opens the schedulers of all workers together.
            on_rollout: Called with each rollout of a batch after the whole batch has arrived.
        """
        scheduler = ClusterScheduler(self.workers, schedule, self.world, on_rollout)
        await scheduler.begin(sampler_states)
        self.workers.renew_schedule = scheduler.renew
        try:
            yield scheduler
        finally:
            self.workers.renew_schedule = None
            await self.workers.ask_all("end_schedule")


@dataclass(slots=True, eq=False)
class ClusterScheduler(BatchScheduler):
    """Lets every worker run its share of each batch."""

    workers: Workers
    schedule: Schedule
    world: Callable[[], int]
    on_rollout: Callable[[Rollout], None] | None
    states: list[dict[str, Any]] = field(default_factory=list)
    """The sampler state of each worker after the last batch, by rank."""
    collecting: bool = False
    """Whether a batch is being collected. If so, the batch's groups that a lost worker had started count as dropped."""
    begun: Counter[int] = field(default_factory=Counter)
    """By a lost worker's rank, the number of groups of the current batch that it had started."""
    counted: Counter[int] = field(default_factory=Counter)
    """By a lost worker's rank, the number of its rollouts of the current batch that already count as lost."""

    async def begin(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Open every worker's scheduler from these states, which may come from a different number of workers."""
        self.states = await self.workers.ask_all("begin", self.schedule, list(states))

    async def play(self, to_come: int | None) -> Sequence[PlayedShare]:
        """Run the next batch on `world()` workers, and return the share of each.

        Args:
            to_come: Number of batches that will follow; None if unknown.
        """
        if (world := self.world()) != len(self.workers.handles):
            await self._spread(world)
        self.collecting = True
        played: list[Played] = await self.workers.ask_all("play_share", to_come)
        self.collecting = False
        self.begun.clear()
        self.counted.clear()
        self.states = [each.state for each in played]
        shares = [each.share for each in played]
        if self.on_rollout is not None:
            for rollout in joined(shares).rollouts:
                self.on_rollout(rollout)
        return shares

    async def sampler_states(self) -> list[dict[str, Any]]:
        self.states = await self.workers.ask_all("state")
        return list(self.states)

    async def renew(self, rank: int, worker: Any) -> None:
        """Give a lost worker's replacement the state after the last batch, and count the rollouts that were lost."""
        states = [dict(state) for state in self.states]
        lost, begun = states[rank]["in_play"], self.begun[rank]
        if self.collecting:
            begun += len(Share(rank, len(states)).of(range(self.schedule.prompts_per_step)))
            states[rank]["in_play"] = {**lost, "started": lost["started"] + begun}
        await answer(worker.begin.remote(self.schedule, states, alone=True))
        rollouts = (lost["started"] + lost["resumed"] + begun) * self.schedule.rollouts
        self.workers.losses.rollouts_lost += rollouts - self.counted[rank]
        self.begun[rank], self.counted[rank] = begun, rollouts

    async def _spread(self, world: int) -> None:
        """Continue with another number of workers.

        Rollouts that are running ahead for later batches are dropped and run again.
        """
        states = await self.sampler_states()
        self.workers.renew_schedule = None  # until then, a replacement gets its state from `begin`
        await self.workers.resize(world)
        await self.begin(states)
        self.workers.renew_schedule = self.renew
