"""A run's parts as Ray actors: the cluster that is joined or started, and the place of each actor on it."""

import asyncio
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentgym.chat.tokenizer import ChatTokenizer, chat_tokenizer
from agentgym.cluster.collector import ClusterCollector, WorkerEngines
from agentgym.cluster.config import SANDBOX
from agentgym.cluster.lost import Losses
from agentgym.cluster.servers import Servers
from agentgym.cluster.trainer import ClusterTrainer, TrainerProcess
from agentgym.cluster.worker import RolloutWorker
from agentgym.cluster.workers import PLACE_S, Workers, no_room
from agentgym.engines.base import Engine
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.environments.env import Env
from agentgym.environments.registry import find_env, gallery
from agentgym.errors import AgentGymError
from agentgym.models import find_model
from agentgym.run.config import RunConfig
from agentgym.run.distributed_rollouts import Collector
from agentgym.run.peers import Share
from agentgym.run.sync.opening import server_settings

if TYPE_CHECKING:
    from agentgym.train.trainer import Trainer

_LOG = logging.getLogger(__name__)
AUTO = "auto"
PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "DOCKER_HOST")
"""Variables of this process that every actor has too, and those that begin with AGENTGYM_."""


@asynccontextmanager
async def joined_cluster(run: RunConfig, losses: Losses) -> AsyncIterator["Cluster"]:
    """Join the Ray cluster that the run names, or start one on this machine; the run's actors end with the block."""
    _refuse_unspreadable(run)
    started = not ray.is_initialized()
    if started:
        await asyncio.to_thread(_connect, run)
    try:
        yield Cluster(replace(run, env=portable_env(run)), losses)
    finally:
        if started:
            await asyncio.to_thread(ray.shutdown)


def _connect(run: RunConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    named = {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("AGENTGYM_")}
    options: dict[str, Any] = {"runtime_env": {"env_vars": named}, "logging_level": logging.WARNING}
    try:
        if run.ray != AUTO:
            ray.init(run.ray, **options)
            return
        try:
            ray.init("auto", **options)
        except ConnectionError:  # none runs here
            ray.init("local", num_cpus=_cpus_here(run), include_dashboard=False, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise AgentGymError(
            f"ray: no cluster could be joined at {run.ray!r} ({said}); start one with `ray start --head`, name its "
            "HOST:PORT, or give auto, which starts one on this machine"
        ) from error


def _cpus_here(run: RunConfig) -> int:
    """The CPUs that a cluster on this machine alone is started with: at least as many as the run's parts ask for."""
    asked = run.cluster.trainers * run.cluster.trainer_cpus + (run.cluster.workers or 1) * run.cluster.worker_cpus
    return max(os.cpu_count() or 1, math.ceil(asked))


def _refuse_unspreadable(run: RunConfig) -> None:
    """Raise ValueError, naming the field, for what a run on Ray does not have."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("ray: torchrun has started several processes; start one, and set cluster.trainers")
    if isinstance(run.engine, SGLangConfig) and run.engine.colocate != "off":
        raise ValueError("engine.colocate: on Ray servers have GPUs of their own; leave it out")
    servers = [name for name, named in run.models.items() if isinstance(named.engine, SGLangConfig)]
    if launched := [name for name in servers if not cast("SGLangConfig", run.models[name].engine).urls]:
        raise ValueError(f"models.{launched[0]}.engine: on Ray its servers are not launched; start them, and give urls")


def portable_env(run: RunConfig) -> Any:
    """Return the run's env under names by which another process finds it."""
    if isinstance(run.env, Mapping):
        return {_portable(name): weight for name, weight in run.env.items()}
    return _portable(run.env)


def _portable(name: str) -> str:
    if ":" in name or name.endswith(".py") or name in gallery():
        return name
    cls = find_env(name)
    module = sys.modules[cls.__module__]
    if cls.__module__ != "__main__" and find_spec(cls.__module__) is not None:
        return f"{cls.__module__}:{cls.__qualname__}"
    return f"{module.__file__}:{cls.__qualname__}"


@dataclass(slots=True, eq=False)
class Cluster:
    """The parts of a run on a Ray cluster."""

    run: RunConfig
    losses: Losses

    def lost(self) -> dict[str, int]:
        """Return the counts of what the run has lost so far."""
        return self.losses.counts()

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator["Trainer"]:
        """Start the training processes side by side, and yield them as one trainer."""
        run, world = self.run, self.run.cluster.trainers
        gpus = 1 if run.train.device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
        bundle = {"CPU": run.cluster.trainer_cpus, "GPU": float(gpus)}
        group = placement_group([bundle] * world, strategy="PACK")
        processes: list[Any] = []
        try:
            if not await asyncio.to_thread(group.wait, PLACE_S):
                raise no_room(f"{world} trainers with {bundle}")
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
            raise ValueError("engine: a run on Ray opens its engines in the workers; name one in the run's config")
        run = self.run
        read = tokenizer if tokenizer is not None else await asyncio.to_thread(chat_tokenizer, run.model)
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
            engines = WorkerEngines(workers, read, client)
            yield ClusterCollector(
                env, engines, Share(), None, run.sampling, run.engine.slots, workers=workers, world=self.world
            )

    @asynccontextmanager
    async def _servers(self, progress: Callable[[str], None]) -> AsyncIterator[Servers | None]:
        """Launch the servers of the run; None where none are launched."""
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
        """Open the driver's client of the servers, which pushes policies; None where the workers sample themselves."""
        run, config = self.run, self.run.engine
        if not isinstance(config, SGLangConfig):
            yield None
            return
        urls = servers.urls if servers is not None else config.urls
        attached = replace(server_settings(run, config), urls=urls, gpus=())
        async with SGLangEngine(find_model(run.model), attached, tokenizer=tokenizer) as client:
            yield client

    def world(self) -> int:
        """The number of rollout workers that the run has, or that the cluster has room for now."""
        if self.run.cluster.workers is not None:
            return self.run.cluster.workers
        boxes = ray.cluster_resources().get(SANDBOX, 0)
        nodes = sum(node["Alive"] for node in ray.nodes())
        return max(1, min(int(boxes) or nodes, self.run.prompts))

    def _start_worker(self, urls: Callable[[], tuple[str, ...]], rank: int, world: int) -> Any:
        boxes = {SANDBOX: 1.0} if ray.cluster_resources().get(SANDBOX, 0) else {}
        start = ray.remote(RolloutWorker).options(
            num_cpus=self.run.cluster.worker_cpus, resources=boxes, scheduling_strategy="SPREAD"
        )
        return start.remote(self.run, Share(rank, world), urls())


async def _moved(client: SGLangEngine, workers: Workers, old: str, new: str) -> None:
    """Tell the driver's client and all workers where a lost server is now."""
    client.move(old, new)
    await workers.ask_all("move", old, new)
