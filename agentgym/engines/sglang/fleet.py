"""The servers of an engine: each of them holds the current policy, or is lost and gets no requests."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from agentgym.adapter import Adapter
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.generation import Attempts
from agentgym.engines.sglang.model_info import context_limit, served, write_adapter
from agentgym.engines.sglang.process import NOT_SGLANG, Progress, ServerProcess, free_port
from agentgym.engines.sglang.router import Router
from agentgym.engines.sglang.server import NoServer, PolicyVersion, Server, ServerFacts
from agentgym.errors import EngineError

_LOG = logging.getLogger(__name__)
_UNLOAD_S = 60.0
"""Seconds for servers to unload this engine's adapters when it closes."""
_SOON_S = 0.5
"""Seconds after which a server that was just lost is asked again for the first time."""


@dataclass(slots=True)
class FleetCounts:
    """Counts of an engine's turns, requests and servers since it opened."""

    turns: int = 0
    requests: int = 0
    retried: int = 0
    """Requests sent again, to the same server or to another."""
    continued: int = 0
    """Requests ended because the weights changed; their turns went on."""
    lost_servers: int = 0
    revived_servers: int = 0


class Fleet:
    """Servers behind one policy. A server that does not answer is lost; the watch takes it back once it serves."""

    def __init__(self, servers: Sequence[Server], config: SGLangConfig, folder: Path) -> None:
        self.servers, self.config, self._folder = tuple(servers), config, folder
        self.router = Router(servers)
        self.policy = PolicyVersion(None, 0)
        self.counts = FleetCounts()
        self.closing = asyncio.Event()
        """An event that is set when the engine closes; all waiting for servers then ends."""
        self._updating = asyncio.Lock()
        self._asked = 0

    @property
    def living(self) -> list[Server]:
        """The servers that are not lost; NoServer where none is left."""
        living = self.router.alive
        if not living:
            raise self._no_server()
        return living

    def next(self, *, avoid: Sequence[Server]) -> Server:
        """Return one server after the other; NoServer where none is left outside `avoid`."""
        usable = [server for server in self.living if server not in avoid]
        if not usable:
            raise self._no_server()
        self._asked += 1
        return usable[self._asked % len(usable)]

    def place(self, session: str, token_ids: Sequence[int], *, avoid: Sequence[Server]) -> Server:
        """Return the session's server; NoServer where none is left outside `avoid`."""
        try:
            return self.router.place(session, token_ids, avoid=avoid)
        except NoServer:
            raise self._no_server() from None

    def attempts(self, what: str) -> Attempts:
        """Return the record of a new request's failed attempts."""
        return Attempts(what, self.servers, wait_s=self.config.server_wait_s)

    # ------------------------------------------------------------------------------------------ policies

    async def load(self, adapter: Adapter | None, *, version: int) -> PolicyVersion:
        """Make base plus adapter the current policy of all servers, or of none; return the policy before it.

        Raises ValueError for an adapter that a server does not serve, EngineError where none is left.
        """
        # A name of its own for every load: servers cannot take a name twice, and keep what an old one meant.
        lora = None if adapter is None else f"agentgym-{uuid4().hex[:12]}-v{version}"
        policy = PolicyVersion(lora, version, None if adapter is None else served(adapter))
        async with self._updating:
            try:
                await self._spread(policy)
            except BaseException:
                await self.unload(policy)
                raise
            old, self.policy = self.policy, policy
        return old

    async def _spread(self, policy: PolicyVersion) -> None:
        if policy.adapter is not None and self.config.adapters == "disk":
            await asyncio.to_thread(write_adapter, policy.adapter, self._folder_of(policy))
        attempts = self.attempts("load_adapter")
        # A server that comes back meanwhile has the policy before.
        while lacking := [server for server in await self._some(attempts) if not server.holds(policy)]:
            refused = await self.each(lacking, lambda server: server.load(policy, self._source_of(policy)))
            if refused:
                raise refused[0]

    async def _some(self, attempts: Attempts) -> list[Server]:
        """The servers that are not lost, waiting for one to come back where all are."""
        while True:
            try:
                return self.living
            except NoServer as nobody:
                await attempts.wait(nobody, self.closing)
                if self.closing.is_set():
                    raise EngineError("load_adapter: the engine was closed") from nobody

    async def unload(self, policy: PolicyVersion) -> None:
        """Forget a policy's adapter on every server that is there, once the requests that use it have ended."""
        if policy.lora is None:
            return
        async with asyncio.TaskGroup() as forgetting:
            for server in self.router.alive:
                forgetting.create_task(_unload(server, [policy.lora]))
        # A server reads an adapter that it unloaded again when it is asked for it: let there be nothing to read.
        shutil.rmtree(self._folder_of(policy), ignore_errors=True)

    async def unload_all(self) -> None:
        """Forget every adapter that the servers that are there were asked to load; what a hung one keeps is logged."""
        try:
            async with asyncio.timeout(_UNLOAD_S), asyncio.TaskGroup() as forgetting:
                for server in self.router.alive:
                    forgetting.create_task(_unload(server, sorted(server.adapters)))
        except TimeoutError:
            left = {repr(server): sorted(server.adapters) for server in self.servers if server.adapters}
            _LOG.warning("servers did not unload these adapters within %g s: %s", _UNLOAD_S, left)

    def _folder_of(self, policy: PolicyVersion) -> Path:
        return self._folder / f"{policy.lora}"

    def _source_of(self, policy: PolicyVersion) -> Path | None:
        return self._folder_of(policy) if self.config.adapters == "disk" else None

    # ------------------------------------------------------------------------------------------ health

    async def each(self, servers: Iterable[Server], ask: Callable[[Server], Awaitable[None]]) -> list[ValueError]:
        """Ask these servers at once; return the refusals. A server that does not answer is lost."""
        refused: list[ValueError] = []

        async def one(server: Server) -> None:
            try:
                await ask(server)
            except ValueError as error:
                refused.append(error)
            except (ConnectionError, EngineError):
                self.lose(server)

        async with asyncio.TaskGroup() as asking:
            for server in servers:
                asking.create_task(one(server))
        return refused

    async def check(self, server: Server) -> None:
        """Lose a server that does not answer."""
        if server.alive and await server.ready(self.config.health_s) is None:
            self.lose(server)

    def lose(self, server: Server) -> None:
        """Ask a server for nothing more; what waits for its answer fails now, and can be sent elsewhere."""
        if server.alive:
            self.counts.lost_servers += 1
            self.router.lose(server)
            server.client.close()

    async def _revive(self, server: Server) -> None:
        """Take a lost server back where it serves again, with the current policy."""
        with suppress(ConnectionError, EngineError, ValueError):
            if server.paused:
                await server.resume()
            # A scheduler that hung is not said to be ready before it has sampled.
            if not (await server.samples(self.config.stall_s) and await server.ready(self.config.health_s) == 200):
                return
            await _unload(server, sorted(server.adapters))  # it may have forgotten them, or not
            while not server.holds(self.policy):  # `load` waits for no lost server: the policy may change meanwhile
                await server.load(self.policy, self._source_of(self.policy))
            self.router.revive(server)
            self.counts.revived_servers += 1

    async def watch(self) -> None:
        """Check every server again and again, whatever the others do."""
        async with asyncio.TaskGroup() as watching:
            for server in self.servers:
                watching.create_task(self._watch_answers(server))
                watching.create_task(self._watch_samples(server))

    async def _watch_answers(self, server: Server) -> None:
        """Lose a server that does not answer; ask it less and less often, and take it back when it serves again."""
        pause_s = self.config.health_s
        while True:
            await asyncio.sleep(pause_s)
            if server.alive:
                await self.check(server)
                pause_s = self.config.health_s if server.alive else min(_SOON_S, self.config.health_s)
            else:
                await self._revive(server)
                pause_s = min(2 * pause_s, self.config.health_s)

    async def _watch_samples(self, server: Server) -> None:
        """Lose a server that answers and samples nothing, but for one that was asked to pause."""
        while True:
            await asyncio.sleep(self.config.health_s)
            if not server.alive or server.paused:
                continue
            if not await server.samples(self.config.stall_s) and not server.paused:
                self.lose(server)

    def _no_server(self) -> NoServer:
        """The error where no server is left; it quotes the logs of the launched servers that have ended."""
        ended = [(s, s.process) for s in self.servers if s.process is not None and s.process.pid is None]
        tails = "".join(f"; {server} ended: {process.log_tail()}" for server, process in ended)
        return NoServer(f"no server is left of {', '.join(map(repr, self.servers)) or 'none'}{tails}")


async def _unload(server: Server, adapters: Sequence[str]) -> None:
    with suppress(ConnectionError):  # it is gone
        for lora in adapters:
            with suppress(EngineError):  # it never had it, or has forgotten it
                await server.unload(lora)


# ---------------------------------------------------------------------------------------------- opening


async def open_servers(
    stack: AsyncExitStack, config: SGLangConfig, model: str | Path | None, folder: Path, progress: Progress | None
) -> list[Server]:
    """Servers that take requests; closing the stack closes their connections and ends those that were launched.

    Raises EngineError, with the end of a launched server's log, where one does not come up.
    """
    if config.urls:
        servers = [Server(url) for url in config.urls]
    else:
        servers = [await _launch(stack, config, str(model), folder / f"server-{i}.log") for i in range(config.servers)]
    for server in servers:
        stack.push_async_callback(server.close)
    try:
        async with asyncio.TaskGroup() as waiting:
            for server in servers:
                waiting.create_task(_ready(server, config, progress))
    except ExceptionGroup as failed:  # Not `except*`: what is raised in that is wrapped again.
        first = failed.exceptions[0]
        raise (first if isinstance(first, EngineError) else failed) from None
    return servers


async def facts_of(server: Server) -> ServerFacts:
    """The settings that a server reports; EngineError where it cannot be reached."""
    try:
        return await server.facts()
    except ConnectionError as error:
        raise EngineError(f"{server}: {error}") from error


async def _launch(stack: AsyncExitStack, config: SGLangConfig, model: str, log: Path) -> Server:
    port = free_port()
    limit = await asyncio.to_thread(context_limit, model)
    process = ServerProcess(config.launch_command(model, port=port, context_limit=limit), log)
    stack.push_async_callback(process.close)
    await process.start()
    return Server(f"http://127.0.0.1:{port}", process)


async def _ready(server: Server, config: SGLangConfig, progress: Progress | None) -> None:
    if server.process is not None:
        await server.process.ready(server.client, startup_s=config.startup_s, progress=progress)
        return
    status = await server.ready(config.health_s)
    if status is None:
        raise EngineError(f"{server}: no server answers; check the url, or start the server")
    if status == 404:
        raise EngineError(f"{server}: {NOT_SGLANG}")
