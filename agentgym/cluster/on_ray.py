"""A run's parts as Ray actors: the cluster, and the placement of each actor on it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.cluster.collector import ClusterCollector, WorkerEngines
from agentgym.cluster.joining import joined, portable_env, worker_count, worker_options
from agentgym.cluster.servers import Servers
from agentgym.cluster.trainer import ClusterTrainer, TrainerProcess
from agentgym.cluster.worker import RolloutWorker
from agentgym.cluster.workers import PLACE_S, Workers, no_room
from agentgym.engines.base import Engine
from agentgym.engines.custom import CustomEngineConfig
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.transformers.engine import TransformersConfig
from agentgym.environments.env import Env
from agentgym.environments.registry import find_env, gallery
from agentgym.hub import find_model
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig
from agentgym.run.lost import Losses
from agentgym.run.open_collector import server_settings
from agentgym.run.peers import Share
from agentgym.run.tasks.envs import member_name

if TYPE_CHECKING:
    from agentgym.train.trainer import Trainer


@asynccontextmanager
async def joined_cluster(run: RunConfig, losses: Losses) -> AsyncIterator["Cluster"]:
    """Join the run's Ray cluster, or start one on this machine. The run's actors stop when the block ends."""
    _refuse_unspreadable(run)
    parts = run.cluster
    cpus = parts.trainers * parts.trainer_cpus + ((parts.workers or 1) + parts.eval_workers) * parts.worker_cpus
    async with joined(run.ray, cpus=cpus):
        yield Cluster(replace(run, env=_portable_envs(run)), losses)


def _refuse_unspreadable(run: RunConfig) -> None:
    """Raise ValueError, naming the field, if a setting isn't supported on Ray."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("ray: torchrun started several processes; start only one, and set cluster.trainers")
    if isinstance(run.engine, SGLangConfig) and run.engine.colocate != "off":
        raise ValueError("engine.colocate: on Ray, servers have their own GPUs; leave it out")
    if run.cluster.eval_workers and not isinstance(run.engine, TransformersConfig | CustomEngineConfig):
        raise ValueError(
            "cluster.eval_workers: with this engine, evaluations can only sample from the newest policy; leave it at 0"
        )
    if run.cluster.eval_workers and not run.eval_every:
        raise ValueError(
            "cluster.eval_workers: there are no evaluations between steps; set eval_every, or leave eval_workers at 0"
        )
    servers = [name for name, named in run.models.items() if isinstance(named.engine, SGLangConfig)]
    if launched := [name for name in servers if not cast("SGLangConfig", run.models[name].engine).urls]:
        raise ValueError(
            f"models.{launched[0]}.engine: on Ray, a run can't launch these servers; start them yourself, and set urls"
        )


def _portable_envs(run: RunConfig) -> Any:
    """Return the run's env under names by which another process finds it."""
    if not isinstance(run.env, Mapping):
        return _portable(run.env)
    found = {name: _portable(name) for name in run.env}
    if renamed := [name for name, portable in found.items() if member_name(portable) != member_name(name)]:
        raise ValueError(f"env: on Ray, write {found[renamed[0]]} instead of {renamed[0]} in the mixture")
    return {found[name]: weight for name, weight in run.env.items()}


def _portable(name: str) -> Any:
    if ":" in name or name.endswith(".py") or name in gallery():
        return name
    return portable_env(find_env(name))


@dataclass(slots=True, eq=False)
class Cluster:
    """The parts of a run on a Ray cluster."""

    run: RunConfig
    losses: Losses = field(default_factory=Losses)

    def lost(self) -> dict[str, int]:
        """Return the counts so far of lost processes, their replacements, and lost rollouts."""
        return self.losses.counts()

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator["Trainer"]:
        """Start the training processes together, and yield them as one trainer."""
        run, world = self.run, self.run.cluster.trainers
        gpus = 1 if run.train.device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
        bundle = {"CPU": run.cluster.trainer_cpus, "GPU": float(gpus)}
        group = placement_group([bundle] * world, strategy="PACK")
        processes: list[Any] = []
        try:
            if not await asyncio.to_thread(group.wait, PLACE_S):
                raise no_room(f"{world} trainers with {bundle} each")
            start = ray.remote(TrainerProcess).options
            processes = [
                start(
                    num_cpus=run.cluster.trainer_cpus,
                    num_gpus=gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
                ).remote(Share(rank, world))
                for rank in range(world)
            ]
            async with ClusterTrainer(processes, run.model, run.train, seed=run.seed) as trainer:
                yield cast("Trainer", trainer)
        finally:
            for process in processes:
                ray.kill(process)
            remove_placement_group(group)

    @asynccontextmanager
    async def collector(
        self,
        env: type[Env[Any]],
        trainer: "Trainer",
        progress: Callable[[str], None],
        tokenizer: ChatTokenizer | None,
        engine: Engine | None,
    ) -> AsyncIterator[Collector]:
        """Start the rollout workers, and yield them as one collector."""
        if engine is not None:
            raise ValueError(
                "engine: a run on Ray opens its engines in the workers; set one in the run's config instead"
            )
        run = self.run
        async with AsyncExitStack() as stack:
            servers = await stack.enter_async_context(self._servers(progress))
            client = await stack.enter_async_context(self._client(servers, tokenizer))
            progress(f"{self.world()} rollout workers")
            start = partial(self._start_worker, lambda: servers.urls if servers is not None else ())
            workers = Workers(start=start, restarts=run.cluster.restarts, losses=self.losses)
            stack.push_async_callback(workers.close)
            await workers.open(self.world())
            if servers is not None and client is not None:
                servers.moved = partial(_moved, client, workers)
            tokenizers = await workers.ask(0, "tokenizers")
            engines = WorkerEngines(workers, tokenizers.get(""), client)
            yield self._collector(env, engines, workers, self.world, tokenizers)

    @asynccontextmanager
    async def evaluator(self, env: type[Env[Any]], progress: Callable[[str], None]) -> AsyncIterator[Collector | None]:
        """Start the workers that run evaluations during training; yield None if the run has none."""
        run, world = self.run, self.run.cluster.eval_workers
        if not world:
            yield None
            return
        progress(f"{world} evaluation workers")
        workers = Workers(
            start=partial(self._start_worker, lambda: ()),
            restarts=run.cluster.restarts,
            losses=self.losses,
            kind="eval_workers",
        )
        try:
            await workers.open(world)
            yield self._collector(env, WorkerEngines(workers, None, None), workers, lambda: world, {})
        finally:
            await workers.close()

    def _collector(
        self,
        env: type[Env[Any]],
        engines: WorkerEngines,
        workers: Workers,
        world: Callable[[], int],
        tokenizers: Mapping[str, Any],
    ) -> Collector:
        """Return a collector for these workers, which open their sandboxes themselves."""
        return ClusterCollector(
            env,
            engines,
            Share(),
            sandboxes=None,
            sampling=self.run.sampling,
            concurrency=self.run.engine.slots,
            workers=workers,
            world=world,
            tokenizers=tokenizers,
        )

    @asynccontextmanager
    async def _servers(self, progress: Callable[[str], None]) -> AsyncIterator[Servers | None]:
        """Launch the run's servers; yield None if it launches none."""
        run, config = self.run, self.run.engine
        if not isinstance(config, SGLangConfig) or config.urls:
            yield None
            return
        servers = Servers(find_model(run.model), server_settings(run, config), run.cluster.restarts, self.losses)
        progress(f"{config.servers} servers")
        try:
            await servers.open()
            yield servers
        finally:
            await servers.close()

    @asynccontextmanager
    async def _client(
        self, servers: Servers | None, tokenizer: ChatTokenizer | None
    ) -> AsyncIterator[SGLangEngine | None]:
        """Open the engine with which the driver pushes policies to the servers.

        Yields None if the run uses no servers. Each worker then has a separate engine in its process.
        """
        run, config = self.run, self.run.engine
        if not isinstance(config, SGLangConfig):
            yield None
            return
        urls = servers.urls if servers is not None else config.urls
        attached = replace(server_settings(run, config), urls=urls, gpus=())
        async with SGLangEngine(find_model(run.model), attached, tokenizer=tokenizer) as client:
            yield client

    def world(self) -> int:
        """Return the configured number of rollout workers, or else the number that currently fits in the cluster."""
        return worker_count(self.run.cluster, self.run.prompts_per_step)

    def _start_worker(self, urls: Callable[[], tuple[str, ...]], rank: int, world: int) -> Any:
        start = ray.remote(RolloutWorker).options(**worker_options(self.run.cluster))
        return start.remote(self.run, Share(rank, world), urls())


async def _moved(client: SGLangEngine, workers: Workers, old: str, new: str) -> None:
    """Tell the driver's engine and all workers the new URL of a lost server."""
    client.move(old, new)
    await workers.ask_all("move", old, new)
