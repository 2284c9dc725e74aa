"""The servers of an engine. A server that lacks the current policy counts as lost, and gets no requests."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from agentgym.engines.fingerprint import digest_of
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.generation import Attempts
from agentgym.engines.sglang.model_info import served, write_adapter
from agentgym.engines.sglang.policies.merged import MergedWeights
from agentgym.engines.sglang.policies.payloads import AdapterFolder, PackedAdapter, Payload, PolicyVersion, Weights
from agentgym.engines.sglang.prompts import Prompt
from agentgym.engines.sglang.router import Router
from agentgym.engines.sglang.server import NoServer, Server
from agentgym.errors import EngineError
from agentgym.types.weights import Adapter, ModelWeights

_LOG = logging.getLogger(__name__)
_UNLOAD_S = 60.0
"""Maximum seconds to wait, when this engine closes, for the servers to unload its adapters."""
_SOON_S = 0.5
"""Seconds from the loss of a server to the first check of whether it responds again."""


@dataclass(slots=True)
class FleetCounts:
    """Counts of an engine's turns, requests and servers since it opened."""

    turns: int = 0
    requests: int = 0
    retried: int = 0
    """Requests that were retried, on the same server or another one."""
    continued: int = 0
    """Requests that were aborted for new weights or to release GPU memory, and whose turns continued."""
    lost_servers: int = 0
    revived_servers: int = 0
    restarts: int = 0
    """Restarts of launched servers that exited unexpectedly."""


class Fleet:
    """The servers of an engine. All of them sample from the same policy.

    A server that doesn't respond is marked as lost. Background checks (`watch`) mark it as available again when it
    serves requests.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: SGLangConfig,
        folder: Path,
        model: str | Path = "",
        *,
        exact: bool = False,
    ) -> None:
        self.servers, self.config, self._folder = tuple(servers), config, folder
        self.router = Router(servers)
        self.policy = PolicyVersion(None, 0)
        self.counts = FleetCounts()
        self.closing = asyncio.Event()
        """Set when the engine closes, which ends all waits for servers."""
        self.open = asyncio.Event()
        """Set while requests may be sent."""
        self.open.set()
        self._merged = MergedWeights(model, bucket_bytes=config.bucket_mb << 20, exact=exact)
        self._payloads: dict[PolicyVersion, Payload] = {}
        """The policies that this client pushed and hasn't unloaded."""
        self._updating = asyncio.Lock()
        self._asked = 0

    @property
    def living(self) -> list[Server]:
        """The servers that are not lost.

        Raises:
            NoServer: If all servers are lost.
        """
        living = self.router.alive
        if not living:
            raise self._no_server()
        return living

    def next(self, *, avoid: Sequence[Server]) -> Server:
        """Return the next server in round-robin order, skipping lost servers and those in `avoid`.

        Raises:
            NoServer: If there is no other server.
        """
        usable = [server for server in self.living if server not in avoid]
        if not usable:
            raise self._no_server()
        self._asked += 1
        return usable[self._asked % len(usable)]

    def place(self, session: str, prompt: Prompt, *, avoid: Sequence[Server]) -> Server:
        """Return the server for a session's next request, skipping lost servers and those in `avoid`.

        Raises:
            NoServer: If there is no other server.
        """
        try:
            return self.router.place(session, prompt, avoid=avoid)
        except NoServer:
            raise self._no_server() from None

    def attempts(self, what: str) -> Attempts:
        """Return a record, still empty, of the failed attempts of a new request. `what` names the request in errors."""
        return Attempts(what, self.servers, wait_s=self.config.server_wait_s)

    # ------------------------------------------------------------------------------------------ policies

    async def push(self, given: Adapter | ModelWeights | None, *, version: int) -> PolicyVersion:
        """Upload an adapter or a whole model to all servers or to none. Nothing samples from it before `pull`.

        Raises:
            ValueError: If a server can't serve it.
            EngineError: If no server is left.
        """
        if isinstance(given, ModelWeights) and self.config.adapters != "merged":
            raise ValueError(
                f"adapters: whole weights cannot be pushed with adapters={self.config.adapters}; set adapters=merged"
            )
        async with self._updating:
            policy, payload = await self._packed(served(given) if isinstance(given, Adapter) else given, version)
            if payload is not None:
                self._payloads[policy] = payload
            try:
                await self._spread(policy, payload)
            except BaseException:
                await self.unload(policy)
                for server in self.router.alive:
                    if not server.holds(self.policy):  # its weights may be partly old and partly new
                        self.lose(server)
                raise
        return policy

    async def take(self, server: Server, policy: PolicyVersion) -> None:
        """Record that a server can sample from a policy that another client uploaded.

        Unless this is already known, the server is asked whether it has the policy.

        Raises:
            EngineError: If the server doesn't have the policy.
        """
        if not server.holds(policy) and not await server.pull(policy):
            raise EngineError(f"{server}: does not have {policy.lora or policy.weights}, which another client pushed")

    def pull(self, policy: PolicyVersion) -> PolicyVersion:
        """Sample new tokens from `policy`, which the servers already have. Return the policy that was used before."""
        old, self.policy = self.policy, policy
        return old

    @property
    def stale(self) -> list[PolicyVersion]:
        """The policies that this client pushed, except for the current one."""
        return [policy for policy in self._payloads if policy != self.policy]

    async def _packed(self, given: Adapter | ModelWeights | None, version: int) -> tuple[PolicyVersion, Payload | None]:
        """Give a policy a new unique name, and pack it for uploading.

        A name can't be reused, because servers remember the earlier policy of that name. The packing runs outside the
        event loop.

        Returns:
            The named policy, and the requests that upload it, or None if it needs no upload.
        """
        name = f"agentgym-{uuid4().hex[:12]}-v{version}"
        digest = await asyncio.to_thread(digest_of, given)
        if self.config.adapters == "merged":
            if given is None and not self._payloads:
                return PolicyVersion(None, version), None
            buckets = await asyncio.to_thread(self._merged.of, given)
            return PolicyVersion(None, version, name, digest), Weights(version, buckets)
        if not isinstance(given, Adapter):
            return PolicyVersion(None, version), None
        if self.config.adapters == "disk":
            await asyncio.to_thread(write_adapter, given, self._folder / name)
            return PolicyVersion(name, version, digest=digest), AdapterFolder(name, self._folder / name)
        receivers = [server.receiver for server in self.servers]
        packed = await asyncio.to_thread(PackedAdapter, name, given, receivers=receivers)
        return PolicyVersion(name, version, digest=digest), packed

    async def _spread(self, policy: PolicyVersion, payload: Payload | None) -> None:
        attempts = self.attempts("load_adapter")
        # This is a loop, because a server that comes back during the upload has only the previous policy.
        while lacking := [server for server in await self._some(attempts) if not server.holds(policy)]:
            refused = await self.each(lacking, lambda server: server.load(policy, payload))
            if refused:
                raise refused[0]

    async def _some(self, attempts: Attempts) -> list[Server]:
        """Return the servers that are not lost. If all servers are lost, wait for one to come back."""
        while True:
            try:
                return self.living
            except NoServer as nobody:
                await attempts.wait(nobody, self.closing)
                if self.closing.is_set():
                    raise EngineError("load_adapter: the engine was closed") from nobody

    async def unload(self, policy: PolicyVersion) -> None:
        """Unload a policy's adapter from every reachable server, once the requests that use it have ended."""
        self._payloads.pop(policy, None)
        if policy.lora is None:
            return
        async with asyncio.TaskGroup() as forgetting:
            for server in self.router.alive:
                forgetting.create_task(_unload(server, [policy.lora]))
        # If a request names an unloaded adapter, the server loads it again from its folder. So the folder is deleted.
        shutil.rmtree(self._folder / policy.lora, ignore_errors=True)

    async def unload_all(self) -> None:
        """Unload every adapter from every reachable server. Log the adapters that a hung server doesn't unload."""
        try:
            async with asyncio.timeout(_UNLOAD_S), asyncio.TaskGroup() as forgetting:
                for server in self.router.alive:
                    forgetting.create_task(_unload(server, sorted(server.adapters)))
        except TimeoutError:
            left = {repr(server): sorted(server.adapters) for server in self.servers if server.adapters}
            _LOG.warning("servers did not unload these adapters within %g s: %s", _UNLOAD_S, left)

    async def set_back(self) -> None:
        """Restore the original weights on every server that this client pushed weights to. Failures are only logged."""
        if self.config.adapters != "merged" or not self._payloads:
            return
        try:
            await self.push(None, version=0)
        except (EngineError, ValueError) as error:
            _LOG.warning("could not restore the servers' original weights; restart the servers: %s", error)

    # ------------------------------------------------------------------------------------------ health

    async def each(self, servers: Iterable[Server], ask: Callable[[Server], Awaitable[None]]) -> list[ValueError]:
        """Call `ask` for all of these servers at the same time. Return the ValueErrors that the calls raised.

        If a call raises ConnectionError or EngineError, its server is marked as lost.
        """
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
        """Mark the server as lost if it doesn't respond."""
        if server.alive and not await server.responds(self.config.health_s):
            self.lose(server)

    def move(self, old: str, new: str) -> None:
        """Mark the server at the URL `old` as lost, and set its URL to `new`. `watch` then checks the new URL."""
        for server in self.servers:
            if server.client.url == old:
                self.lose(server)
                server.move(new)

    def lose(self, server: Server) -> None:
        """Mark a server as lost, so that it gets no more requests.

        Its pending requests fail at once, so they can be sent to other servers.
        """
        if server.alive:
            self.counts.lost_servers += 1
            self.router.lose(server)
            server.client.close()

    async def _revive(self, server: Server) -> None:
        """Load the current policy into a lost server and mark it as available, if it serves requests again."""
        with suppress(ConnectionError, EngineError, ValueError):
            if server.process is not None and server.process.ended:
                await self._restart(server)
            if server.paused:
                await server.resume()
            # A response from /ready isn't enough, because the scheduler may have hung: the server must also sample an
            # id.
            if not (await server.samples(self.config.stall_s) and await server.ready(self.config.health_s) == 200):
                return
            await _unload(server, sorted(server.adapters))  # The server may still have these adapters.
            server.doubt()
            while not server.holds(self.policy):  # `push` skips lost servers, so the policy may change meanwhile
                payload = self._payloads.get(self.policy)
                if payload is not None:
                    await server.load(self.policy, payload)
                elif not await server.pull(self.policy):
                    return  # the client that pushed the policy will load it
            self.router.revive(server)
            self.counts.revived_servers += 1

    async def _restart(self, server: Server) -> None:
        """Restart a launched server.

        Raises:
            EngineError: If it doesn't become ready, or has no restarts left.
        """
        process = server.process
        if process is None or not process.restarts_left:
            raise EngineError(f"{server} ended, and has no restarts left")
        _LOG.warning("%s ended and is being restarted; its log ended: %s", server, process.log_tail(3))
        self.counts.restarts += 1
        await process.restart()
        server.forget()
        await process.ready(server.client, startup_s=self.config.startup_s, progress=None)

    async def watch(self) -> None:
        """Check every server periodically, independently of the others."""
        async with asyncio.TaskGroup() as watching:
            for server in self.servers:
                watching.create_task(self._watch_answers(server))
                watching.create_task(self._watch_samples(server))

    async def _watch_answers(self, server: Server) -> None:
        """Mark the server as lost if it doesn't respond.

        A lost server is checked at growing intervals, and used again when it serves requests.
        """
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
        """Mark a server as lost if it responds to health checks but doesn't sample, unless it is paused."""
        while True:
            await asyncio.sleep(self.config.health_s)
            if not server.alive or server.paused or not self.open.is_set():
                continue
            if not await server.samples(self.config.stall_s) and not server.paused and self.open.is_set():
                self.lose(server)

    def _no_server(self) -> NoServer:
        """Return a NoServer error that quotes the logs of launched servers that have ended."""
        ended = [(s, s.process) for s in self.servers if s.process is not None and s.process.pid is None]
        tails = "".join(f"; {server} ended: {process.log_tail()}" for server, process in ended)
        return NoServer(
            f"no server is left of the configured ones: {', '.join(map(repr, self.servers)) or 'none'}{tails}"
        )


async def _unload(server: Server, adapters: Sequence[str]) -> None:
    with suppress(ConnectionError):  # the server is gone
        for lora in adapters:
            with suppress(EngineError):  # the server never had it, or has forgotten it
                await server.unload(lora)
