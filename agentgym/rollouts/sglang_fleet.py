"""The servers of an engine as one: each of them holds the current policy, or is lost."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from agentgym.errors import EngineError
from agentgym.rollouts.sglang_config import SGLangConfig
from agentgym.rollouts.sglang_model import context_limit, served, write_adapter
from agentgym.rollouts.sglang_process import Progress, ServerProcess, free_port
from agentgym.rollouts.sglang_router import Router
from agentgym.rollouts.sglang_server import Policy, Server
from agentgym.types import Adapter


@dataclass(slots=True)
class Counts:
    """What became of an engine's turns, requests and servers since it opened."""

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
        self.servers, self._config, self._folder = tuple(servers), config, folder
        self.router = Router(servers)
        self.policy = Policy(None, 0)
        self.counts = Counts()
        self._updating = asyncio.Lock()
        self._asked = 0

    @property
    def living(self) -> list[Server]:
        """The servers that are not lost; EngineError, with the last words of our own, where none is left."""
        living = self.router.alive
        if not living:
            raise EngineError(f"no server is left of {', '.join(map(repr, self.servers))}{self._last_words()}")
        return living

    def next(self) -> Server:
        """One server after the other."""
        living = self.living
        self._asked += 1
        return living[self._asked % len(living)]

    def place(self, session: str, token_ids: Sequence[int], *, avoid: Sequence[Server]) -> Server:
        """The session's server; EngineError where none is left that is not to be avoided."""
        try:
            return self.router.place(session, token_ids, avoid=avoid)
        except EngineError as error:
            raise EngineError(f"{error}{self._last_words()}") from None

    # ------------------------------------------------------------------------------------------ policies

    async def load(self, adapter: Adapter | None, *, version: int) -> Policy:
        """Make base plus adapter the current policy of all servers, or of none; the policy that it replaced.

        Raises ValueError for an adapter that a server does not serve, EngineError where none is left.
        """
        # A name of its own for every load: servers cannot take a name twice, and keep what an old one meant.
        lora = None if adapter is None else f"agentgym-{uuid4().hex[:12]}-v{version}"
        policy = Policy(lora, version, None if adapter is None else served(adapter))
        async with self._updating:
            try:
                await self._spread(policy)
            except BaseException:
                await self.unload(policy)
                raise
            old, self.policy = self.policy, policy
        return old

    async def _spread(self, policy: Policy) -> None:
        if policy.adapter is not None and self._config.adapters == "disk":
            await asyncio.to_thread(write_adapter, policy.adapter, self._folder_of(policy))
        refused = await self.each(self.living, lambda server: server.load(policy, self._source_of(policy)))
        if refused:
            raise refused[0]
        self.living  # noqa: B018  raises where the last one was lost meanwhile

    async def unload(self, policy: Policy) -> None:
        """Forget a policy's adapter on every server that is there, once the requests that use it have ended."""
        if policy.lora is None:
            return
        lora = policy.lora
        for server in self.router.alive:
            with suppress(ConnectionError, EngineError):  # gone, or never had it
                await server.unload(lora)
        # A server reads an adapter that it unloaded again when it is asked for it: let there be nothing to read.
        shutil.rmtree(self._folder_of(policy), ignore_errors=True)

    def _folder_of(self, policy: Policy) -> Path:
        return self._folder / f"{policy.lora}"

    def _source_of(self, policy: Policy) -> Path | None:
        return self._folder_of(policy) if self._config.adapters == "disk" else None

    # ------------------------------------------------------------------------------------------ health

    async def each(self, servers: Iterable[Server], ask: Callable[[Server], Awaitable[None]]) -> list[ValueError]:
        """Ask these servers at once; what those said that refused. A server that cannot be asked is lost."""
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
        if server.alive and not await server.answers(self._config.health_s):
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
            if not await server.ready(self._config.health_s):
                return
            async with self._updating:
                if self.policy.lora is not None:
                    with suppress(EngineError):  # it may have forgotten it, or not
                        await server.unload(self.policy.lora)
                    await server.load(self.policy, self._source_of(self.policy))
                self.router.revive(server)
                self.counts.revived_servers += 1

    async def watch(self) -> None:
        """Check every server again and again."""
        while True:
            await asyncio.sleep(self._config.health_s)
            async with asyncio.TaskGroup() as checks:
                for server in self.servers:
                    checks.create_task(self.check(server) if server.alive else self._revive(server))

    def _last_words(self) -> str:
        """What those of our own servers that have ended said last."""
        ended = [s for s in self.servers if s.process is not None and s.process.pid is None]
        return "".join(f"; {s} ended: {s.process.last_words()}" for s in ended if s.process is not None)


# ---------------------------------------------------------------------------------------------- opening


async def open_servers(
    stack: AsyncExitStack, config: SGLangConfig, model: str | Path | None, folder: Path, progress: Progress | None
) -> list[Server]:
    """Servers that take requests; closing the stack closes their connections and ends those that were launched.

    Raises EngineError, with a launched server's last words, where one does not come up.
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
    elif not await server.answers(config.health_s):
        raise EngineError(f"{server}: nobody answers")
