"""The SGLang servers of a run on Ray, each in an actor that is replaced if it is lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from agentgym.cluster.workers import answer, answers
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.engine import SGLangEngine
from agentgym.errors import AgentGymError
from agentgym.run.lost import Losses

_LOG = logging.getLogger(__name__)


class ServerActor:
    """Launches one server on its node, on the GPUs that Ray assigned, and restarts it if it terminates unexpectedly."""

    def __init__(self, model: Path | str, config: SGLangConfig) -> None:
        host = ray.util.get_node_ip_address()
        self._engine = SGLangEngine.launch(model, replace(config, servers=1, gpus=(), host=host))
        self._stack = AsyncExitStack()

    async def open(self) -> str:
        """Launch the server; return its URL once it accepts requests."""
        engine = await self._stack.enter_async_context(self._engine)
        return engine.urls[0]

    async def close(self) -> None:
        """Stop the server and all its processes."""
        await self._stack.aclose()

    async def serve(self) -> None:
        """Wait forever, so that the caller notices when this process ends."""
        await asyncio.Event().wait()


@dataclass(slots=True, eq=False)
class Servers:
    """The servers of a run, by URL. A server whose process or node is lost is replaced wherever the cluster has room.

    `moved` is called with the URL of the lost server and the URL of its replacement.
    """

    model: Path | str
    config: SGLangConfig
    restarts: int
    losses: Losses
    """Counts lost servers and their replacements."""
    moved: Callable[[str, str], Awaitable[None]] | None = None
    lost: int = 0
    """Number of lost servers. At most `restarts` of them are replaced."""
    actors: dict[str, Any] = field(default_factory=dict)
    _watching: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' URLs."""
        return tuple(self.actors)

    async def open(self) -> None:
        """Start all servers at once, and watch them."""
        started = [self._start() for _ in range(self.config.servers)]
        try:
            urls = await answers([actor.open.remote() for actor in started])
        except Exception:
            for actor in started:
                ray.kill(actor)
            raise
        for url, actor in zip(urls, started, strict=True):
            self.actors[url] = actor
            self._watching.append(asyncio.create_task(self._watch(url, actor)))

    async def close(self) -> None:
        """Stop all servers."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        actors, self.actors = list(self.actors.values()), {}
        closing = [asyncio.wrap_future(actor.close.remote().future()) for actor in actors]
        if closing:
            await asyncio.wait(closing)
        for actor in actors:
            ray.kill(actor)

    def _start(self) -> Any:
        gpus = self.config.tp if ray.cluster_resources().get("GPU", 0) else 0
        options = {"num_cpus": 0 if gpus else 1, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        return ray.remote(ServerActor).options(**options).remote(self.model, self.config)

    async def _watch(self, url: str, actor: Any) -> None:
        """Start a replacement whenever the server's process has ended, as long as `restarts` allows it."""
        while True:
            try:
                await actor.serve.remote()
            except RayActorError as error:
                said = str(error).splitlines()[0]
            del self.actors[url]
            self.lost += 1
            self.losses.servers_lost += 1
            if self.lost > self.restarts:
                _LOG.error("cluster.restarts: no more servers are replaced, because %d were lost: %s", self.lost, said)
                return
            _LOG.warning("the server at %s was lost; starting a replacement: %s", url, said)
            actor = self._start()
            try:
                fresh: str = await answer(actor.open.remote())
            except (RayActorError, AgentGymError) as again:
                _LOG.error("the server at %s could not be replaced: %s", url, str(again).splitlines()[0])
                return
            self.actors[fresh] = actor
            self.losses.servers_replaced += 1
            if self.moved is not None:
                await self.moved(url, fresh)
            url = fresh
