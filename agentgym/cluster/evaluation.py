"""Evaluation on a Ray cluster: workers that run single rollouts, and the driver's side of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import ray

from agentgym.cluster.joining import joined, portable_env, worker_count, worker_options
from agentgym.cluster.worker import EngineFacts, facts_of, sendable_tokenizers
from agentgym.cluster.workers import Workers
from agentgym.engines.base import Engine
from agentgym.engines.endpoint.endpoint import Endpoint
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.token_bytes import bytes_of
from agentgym.environments.env import Env
from agentgym.environments.mixture import parameter_values
from agentgym.evals.opening import OWN_CHAT, ChatSettings, Model, is_url
from agentgym.evals.playing import OwnPlaying, open_playing
from agentgym.hub import exists
from agentgym.run.cluster_config import ClusterConfig
from agentgym.run.lost import Losses
from agentgym.run.tasks.envs import open_envs
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Rollout
from agentgym.types.task import Task

T = TypeVar("T")
BESIDE = 16
"""Maximum number of calls that a worker handles at once in addition to its rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The servers of an engine, and the policy to request from them."""

    model: str
    config: SGLangConfig
    policy: Any
    """The policy to sample from; None for the model that the servers loaded."""


Elsewhere: TypeAlias = Path | str | Endpoint | Served
"""A description from which another process can open a model."""


def elsewhere(model: Model, field: str) -> Elsewhere:
    """Return a description from which another process can open the same model.

    Raises:
        ValueError: If the model is open in this process only. The message names the field.
    """
    if isinstance(model, str | Path):
        return model if is_url(model) or not exists(model) else Path(model).absolute()
    if isinstance(model, Endpoint):
        return model.unopened()
    if isinstance(model, SGLangEngine):
        policy = model.current_policy()
        config = SGLangConfig(urls=model.urls)
        return Served(model=model.model_name, config=config, policy=policy if policy.version else None)
    raise ValueError(
        f"{field}: on Ray, each worker opens the model itself, but this {type(model).__name__} is open in this "
        "process; pass its model's name or folder, an endpoint, or an engine on servers"
    )


@asynccontextmanager
async def opened(given: Elsewhere) -> AsyncIterator[Path | str | Engine]:
    """Open an endpoint, or an engine for running servers; yield names and folders unchanged."""
    if isinstance(given, str | Path):
        yield given
    elif isinstance(given, Endpoint):
        async with given as endpoint:
            yield endpoint
    else:
        async with SGLangEngine(given.model, given.config) as client:
            if given.policy is not None:
                await client.pull(given.policy)
            yield client


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The settings that all workers of an evaluation get."""

    env: str | dict[str, float]
    env_args: Mapping[str, Any]
    model: Elsewhere
    models: Mapping[str, Elsewhere]
    sampling: Sampling | None
    seed: int
    at_once: int
    """Concurrent rollouts per worker."""
    chat: ChatSettings = OWN_CHAT
    """How chats with the model are rendered."""


class EvaluationWorker:
    """Runs rollouts with its own model, sandboxes and resources. Call `open` first and `close` last."""

    def __init__(self, job: Job) -> None:
        self._job, self._stack = job, AsyncExitStack()
        self._playing: OwnPlaying | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self) -> EngineFacts:
        """Open the model, the model roles, sandboxes and resources."""
        job, enter = self._job, self._stack.enter_async_context
        env = open_envs(job.env, job.env_args, "auto")
        model = await enter(opened(job.model))
        models: dict[str, Model] = {name: await enter(opened(given)) for name, given in job.models.items()}
        opening = open_playing(env, model, models, None, job.sampling, job.seed, at_once=job.at_once, chat=job.chat)
        self._playing = await enter(opening)
        return facts_of(self._playing.engine)

    async def play(self, task: Task, rollout_id: str) -> Rollout:
        """Return a rollout of the task."""
        return await self._run(self._opened_now.play(task, rollout_id))

    async def judge(self, task: Task, scored: Sequence[Rollout]) -> list[Rollout]:
        """Return a task's scored rollouts with their group rewards added."""
        return await self._run(self._opened_now.judge(task, scored))

    async def tokenizers(self) -> dict[str, Any]:
        """Return the models' tokenizers by name; the key of the evaluated model is ""."""
        return sendable_tokenizers(self._opened_now.engine, self._opened_now.models)

    async def close(self) -> None:
        """Cancel running rollouts, and close everything that was opened."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._stack.aclose()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a task that `close` cancels."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await task

    @property
    def _opened_now(self) -> OwnPlaying:
        assert self._playing is not None, "open() comes first"
        return self._playing


class RayPlaying:
    """Sends each rollout to the least busy worker. If the worker is lost, its replacement runs the rollout again."""

    def __init__(self, workers: Workers, tokenizers: Mapping[str, Any]) -> None:
        self._workers, self._tokenizers = workers, tokenizers
        self._busy = [0] * len(workers.handles)
        """Number of rollouts that each worker is running."""

    async def play(self, task: Task, rollout_id: str) -> Rollout:
        """Return a rollout of the task, or a failed one if the env's own code cancelled it."""
        rollout: Rollout = await self._ask("play", task, rollout_id)
        return rollout

    async def judge(self, task: Task, scored: Sequence[Rollout]) -> list[Rollout]:
        """Return a task's scored rollouts with their group rewards added."""
        judged: list[Rollout] = await self._ask("judge", task, list(scored))
        return judged

    def token_bytes(self) -> Callable[[str, Sequence[int]], dict[int, bytes]]:
        """Return a function that maps a model role ("" for the evaluated model) and token ids to the tokens' bytes."""
        return bytes_of(self._tokenizers)

    async def _ask(self, method: str, *values: Any) -> Any:
        rank = self._busy.index(min(self._busy))
        self._busy[rank] += 1
        try:
            return await self._workers.ask(rank, method, *values)
        finally:
            self._busy[rank] -= 1


@asynccontextmanager
async def open_playing_on_ray(
    env: type[Env[Any]],
    model: Model,
    models: Mapping[str, Model],
    sandboxes: SandboxPool | None,
    sampling: Sampling | None,
    seed: int,
    *,
    at_once: int,
    chat: ChatSettings,
    address: str,
    workers: int | None,
) -> AsyncIterator[RayPlaying]:
    """Join the cluster and start an evaluation's workers, each of which opens the model. They stop when the block ends.

    Raises:
        ValueError: If something can't be opened in another process: sandboxes, an engine, or a class inside a
            function.
    """
    if sandboxes is not None:
        raise ValueError("sandboxes: on Ray, each worker opens its own sandboxes; leave them out")
    job = Job(
        env=portable_env(env),
        env_args=parameter_values(env),
        model=elsewhere(model, "model"),
        models={name: elsewhere(each, f"models[{name!r}]") for name, each in models.items()},
        sampling=sampling,
        seed=seed,
        at_once=at_once,
        chat=chat,
    )
    config = ClusterConfig(workers=workers)
    async with joined(address, cpus=(workers or 1) * config.worker_cpus), AsyncExitStack() as stack:
        world = worker_count(config, at_once)
        own = replace(job, at_once=-(-at_once // world))
        options = worker_options(config) | {"max_concurrency": own.at_once + BESIDE}

        def start(rank: int, world: int) -> Any:
            return ray.remote(EvaluationWorker).options(**options).remote(own)

        played_by = Workers(start=start, restarts=config.restarts, losses=Losses(), kind="eval_workers")
        stack.push_async_callback(played_by.close)
        await played_by.open(world)
        yield RayPlaying(played_by, await played_by.ask(0, "tokenizers"))
