"""A process that runs one share of a run's rollouts, with its own engine and sandboxes."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from agentgym.engines.base import Engine, SharedEngine, own_model_name
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.token_bytes import tokenizers_of
from agentgym.machine.time_limits import all_clocks_stopped
from agentgym.run.collector import BatchScheduler, Collector, PlayedShare
from agentgym.run.config import RunConfig
from agentgym.run.open_collector import open_collector, own_template
from agentgym.run.peers import Share
from agentgym.run.tasks.chosen import only_tasks
from agentgym.run.tasks.envs import open_envs
from agentgym.scheduling.schedule import Schedule
from agentgym.types.arrays import Floats
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.weights import Adapter, ModelWeights
from agentgym.weight_sync.sync import load

_LOG = logging.getLogger(__name__)
Policy: TypeAlias = Adapter | ModelWeights | None
"""A policy that a worker's separate engine can load; None for the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Properties of a worker's open engine, as sent to the driver, which is the process that uses the workers."""

    context_tokens: int
    dtype: str
    model_name: str


def facts_of(engine: Engine) -> EngineFacts:
    """Return the properties of an open engine that the driver needs."""
    return EngineFacts(
        context_tokens=engine.context_tokens,
        dtype=str(getattr(engine, "dtype", "")),
        model_name=own_model_name(engine),
    )


def sendable_tokenizers(policy: Engine, models: Mapping[str, Engine]) -> dict[str, Any]:
    """Return the models' tokenizers by name, "" for the policy; omit those that can't be sent, with a warning."""
    from ray import cloudpickle

    found = {}
    for name, tokenizer in tokenizers_of(policy, models).items():
        try:
            cloudpickle.dumps(tokenizer)
            found[name] = tokenizer
        except Exception as error:  # a custom engine's tokenizer can be anything
            _LOG.warning(
                "the tokenizer of the model %r cannot be sent to the driver, so its tokens are stored without their "
                "texts: %s",
                name,
                error,
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One worker's share of a batch and its sampler state after the batch, so that both arrive or neither does."""

    share: PlayedShare
    state: dict[str, Any]


class RolloutWorker:
    """Runs the rollouts of one share. Call `open` first and `close` last.

    `urls` are the servers that the worker's engine uses. If there are none, the engine runs in this process.
    """

    def __init__(self, run: RunConfig, share: Share, urls: Sequence[str] = ()) -> None:
        engine = run.engine
        if urls and isinstance(engine, SGLangConfig):
            engine = replace(engine, urls=tuple(urls), gpus=())
        self._run, self._share = replace(run, engine=engine), share
        self._stack, self._scheduling = AsyncExitStack(), AsyncExitStack()
        self._collector: Collector | None = None
        self._scheduler: BatchScheduler | None = None

    async def open(self) -> EngineFacts:
        """Open the engine, sandboxes, resources and model roles, unless they are already open."""
        if self._collector is not None:
            return facts_of(self._collector.engine)
        run = self._run
        env = only_tasks(open_envs(run.env, run.env_args, run.sandbox), run.tasks_from)
        tokenizer = await asyncio.to_thread(own_template, run)
        opening = open_collector(run, env, self._share, lambda said: None, tokenizer=tokenizer)
        self._collector = await self._stack.enter_async_context(opening)
        return facts_of(self._collector.engine)

    async def tokenizers(self) -> dict[str, Any]:
        """Return the models' tokenizers by name, "" for the policy."""
        return sendable_tokenizers(self._opened.engine, self._opened.models)

    async def begin(
        self, schedule: Schedule, states: Sequence[Mapping[str, Any]], *, alone: bool = False
    ) -> dict[str, Any]:
        """Open the scheduler, and return this worker's sampler state.

        Args:
            schedule: The schedule of the rollouts.
            states: The sampler states of all workers to continue from, by rank.
            alone: Whether this worker replaces a lost one while the other workers continue. If so, it counts the
                groups that the lost worker had in progress as dropped.
        """
        opening = self._opened.schedule(schedule, states, alone=alone)
        self._scheduler = await self._scheduling.enter_async_context(opening)
        return await self.state()

    async def play_share(self, to_come: int | None) -> Played:
        """Run this worker's share of the next batch.

        Args:
            to_come: Number of batches that will follow; None if unknown.
        """
        assert self._scheduler is not None, "begin() comes first"
        [share] = await self._scheduler.play(to_come)
        return Played(share=share, state=await self.state())

    async def state(self) -> dict[str, Any]:
        """Return this worker's sampler state. Call it between two batches."""
        assert self._scheduler is not None, "begin() comes first"
        [state] = await self._scheduler.sampler_states()
        return state

    async def end_schedule(self) -> None:
        """Close the scheduler, which cancels running rollouts."""
        scheduling, self._scheduling = self._scheduling, AsyncExitStack()
        self._scheduler = None
        await scheduling.aclose()

    async def play(self, tasks: Sequence[Any], schedule: Schedule) -> list[Group]:
        """Run a group of each of these tasks, and return the groups in the same order."""
        return list(await replace(self._opened, peers=Share()).collect(tasks, schedule, must_score=False))

    async def load(self, policy: Policy, version: int) -> None:
        """Load this policy into this process's engine, to sample from it."""
        with all_clocks_stopped():
            await load(self._opened.engine, policy, version=version)

    async def move(self, old: str, new: str) -> None:
        """Use the server at `new` instead of the lost one at `old`."""
        engine = self._opened.engine
        if isinstance(engine, SGLangEngine):
            engine.move(old, new)

    async def hold(self) -> None:
        """Send no requests until `pull` is called, if a push would change the weights under running requests."""
        await self._shared.hold()

    async def pull(self, pushed: Any) -> None:
        """Start sampling from a policy that the driver pushed to the servers."""
        with all_clocks_stopped():
            await self._shared.pull(pushed)

    async def score(self, token_ids: Sequence[int], sampling: Sampling) -> Floats:
        """Return the log-probabilities of this worker's engine."""
        with all_clocks_stopped():
            return await self._opened.engine.score(token_ids, sampling=sampling)

    async def close(self) -> None:
        """Cancel running rollouts, and close everything that was opened."""
        try:
            await self.end_schedule()
        finally:
            await self._stack.aclose()

    @property
    def _opened(self) -> Collector:
        assert self._collector is not None, "open() comes first"
        return self._collector

    @property
    def _shared(self) -> SharedEngine:
        engine = self._opened.engine
        assert isinstance(engine, SharedEngine)
        return engine
