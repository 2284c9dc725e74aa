"""The network of one sandbox on the client's side: the proxy's log, forwarded ports, and services."""

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol
from urllib.parse import SplitResult

from agentgym.errors import SandboxError
from agentgym.machine.finished import finished
from agentgym.sandboxes.faults import readable
from agentgym.sandboxes.network.acceptor import forget_waiting
from agentgym.sandboxes.network.background import BACKGROUND
from agentgym.sandboxes.network.forward import Forward
from agentgym.sandboxes.network.proxy import Proxy
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.network.stock import Stock
from agentgym.sandboxes.protocol import Lifetime, LocalAddress, NetworkRequest, SandboxService
from agentgym.sandboxes.protocol.arguments import check_timeout
from agentgym.sandboxes.protocol.content import LateContent

NO_NETWORK = (
    'this sandbox has no network that the host can reach; use Docker(network="loopback") or '
    'Bubblewrap(network="loopback")'
)
_log = logging.getLogger("agentgym.sandboxes")


class Beside(Protocol):
    """The services next to a sandbox."""

    @property
    def each(self) -> Mapping[str, SandboxService]: ...

    async def remove(self) -> None:
        """Remove the containers of all services."""
        ...

    async def start(self) -> None:
        """Start each service from its image and wait until it is ready."""
        ...


class SandboxNetwork:
    """A client's access to a sandbox's network.

    `sockets` are the ones that the sandbox's server created, with the proxy's listener first if `allow` is given. This
    object owns them. Without sockets, the sandbox has no network.
    """

    def __init__(self, sockets: Sequence[socket.socket] = (), allow: Allow | None = None) -> None:
        self._allow = allow
        self._listener = sockets[0] if allow is not None else None
        self._stock = Stock(sockets[1:] if allow is not None else sockets) if sockets else None
        self._proxy: Proxy | None = None
        self._forwards: set[Forward] = set()
        self._episode = 0
        self.beside: Beside | None = None
        self.late = 0
        """Number of connections to the proxy that were dropped because their episode was ending."""
        if self._stock is not None:
            BACKGROUND.hold()

    async def begin(self) -> None:
        """Start an episode with new services and an empty log.

        Call this only when no process of the last episode is left in the sandbox. Connections that were made to the
        proxy while the last episode was ending are dropped and counted.
        """
        if self.beside is not None:
            await self.beside.remove()
        if self._listener is not None and self._allow is not None:
            self._proxy = Proxy(self._listener, self._allow)
            late = await BACKGROUND.complete(_begin(self._listener, self._proxy))
            if late:
                self.late += late
                _log.info("%d connections to a sandbox's proxy were dropped because its episode was ending", late)
        if self.beside is not None:
            await self.beside.start()

    async def end(self) -> None:
        """End an episode's requests and forwarded ports."""
        self._episode += 1
        running: list[Forward | Proxy] = [*self._forwards, *([self._proxy] if self._proxy is not None else [])]
        self._forwards.clear()
        if running:
            await BACKGROUND.complete(_stop(running))

    async def close(self) -> None:
        """End everything and close every socket; closing twice is harmless."""
        stock, self._stock = self._stock, None
        if stock is None:
            return
        try:
            await self.end()
        finally:
            self._proxy = None
            stock.close()
            if self._listener is not None:
                self._listener.close()
            BACKGROUND.release()

    def requests(self) -> list[NetworkRequest]:
        """Return all requests of this episode to the proxy, in the order in which they started."""
        return [record.view() for record in self._proxy.records] if self._proxy is not None else []

    @asynccontextmanager
    async def port(self, port: int, timeout_s: float) -> AsyncIterator[LocalAddress]:
        """Yield an address of this machine that leads to the port, once something listens there."""
        if type(port) is not int or not 1 <= port <= 65535:
            raise ValueError(f"port: must be a whole number from 1 to 65535, got {port!r}")
        stock = self._usable("port")
        episode = self._episode
        try:
            await BACKGROUND.run(stock.wait_for(port, timeout_s))
        except TimeoutError as error:
            raise LateContent(str(error)) from error
        if episode != self._episode:
            raise SandboxError(f"port: the episode that requested port {port} has ended")
        forward = Forward(stock, port)
        self._forwards.add(forward)
        try:
            yield await BACKGROUND.complete(_start(forward))
        finally:
            if forward in self._forwards:  # If not, the episode has ended, and stopped it.
                self._forwards.discard(forward)
                await BACKGROUND.complete(forward.stop())

    async def wait_for(self, port: int, timeout_s: float, url: SplitResult | None = None) -> None:
        """Wait until something in the sandbox listens on the port and, if a URL is given, answers it.

        The status of the answer must be below 400.

        Raises:
            TimeoutError: If that takes longer than `timeout_s`.
        """
        await BACKGROUND.run(self._usable("port").wait_for(port, timeout_s, url))

    def service(self, name: str) -> SandboxService:
        """Return the service.

        Raises:
            ValueError: If the sandbox has no service of that name.
        """
        services = {} if self.beside is None else self.beside.each
        if name not in services:
            raise ValueError(f"service: the sandbox has no service named {name!r}; it has {sorted(services)}")
        return services[name]

    def _usable(self, call: str) -> Stock:
        if self._stock is None:
            raise ValueError(f"{call}: {NO_NETWORK} instead")
        return self._stock


class Networked:
    """The calls of a sandbox that reach its network and its services."""

    network: SandboxNetwork
    lifetime: Lifetime

    def requests(self) -> Sequence[NetworkRequest]:
        """Return all requests of this episode to the sandbox's proxy."""
        self.lifetime.check()
        return self.network.requests()

    @asynccontextmanager
    async def port(self, port: int, *, timeout_s: float = 10.0) -> AsyncIterator[LocalAddress]:
        """Yield an address of this machine that leads to the sandbox's port."""
        check_timeout(timeout_s)
        self.lifetime.check()
        async with self.network.port(port, timeout_s) as address:
            yield address

    def service(self, name: str) -> SandboxService:
        """Return the sandbox's service of that name."""
        self.lifetime.check()
        return self.network.service(name)


async def _begin(listener: socket.socket, proxy: Proxy) -> int:
    late = forget_waiting(listener)
    proxy.start()
    return late


async def _stop(running: Sequence[Forward | Proxy]) -> None:
    for each in running:
        await each.stop()


async def _start(forward: Forward) -> LocalAddress:
    return forward.start()


async def release(network: SandboxNetwork, end: Callable[[], Awaitable[None]]) -> None:
    """Close a sandbox's network and then `end` the sandbox, however often the caller is cancelled meanwhile."""

    async def both() -> None:
        try:
            await network.close()
        finally:
            await end()

    await finished(both())


async def receive(connection: socket.socket, count: int, timeout_s: float) -> list[socket.socket]:
    """Return the sockets that a sandbox's server sends before its first message.

    Only the one byte that comes with them is read from the connection.

    Raises:
        SandboxError: If the server ends, sends another number of sockets, or sends none within `timeout_s`.
    """
    connection.setblocking(False)
    try:
        await readable(connection.fileno(), timeout_s)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not start: it created no sockets within {timeout_s:.0f} s") from None
    try:
        said, numbers, _, _ = socket.recv_fds(connection, 1, count, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"the sandbox did not start: {error}") from error
    made = [socket.socket(fileno=number) for number in numbers]
    if said and len(made) == count:
        return made
    for each in made:
        each.close()
    raise SandboxError(
        "the sandbox did not start: its server ended before it had passed its network sockets to this process"
    )
