"""A port of this machine that leads to a port inside a sandbox."""

import logging
import socket
from contextlib import closing

from agentgym.sandboxes.network.acceptor import Acceptor
from agentgym.sandboxes.network.stock import Stock
from agentgym.sandboxes.network.streams import Stream, both_ways
from agentgym.sandboxes.protocol import LocalAddress

CONNECTIONS = 32
_log = logging.getLogger("agentgym.sandboxes")


class Forward:
    """Listens on a free port of 127.0.0.1 and connects each client to a port of the sandbox, all in one event loop."""

    def __init__(self, stock: Stock, port: int) -> None:
        self._stock, self._port = stock, port
        self._listener = socket.socket()
        try:
            self._listener.bind(("127.0.0.1", 0))
            self._listener.listen(CONNECTIONS)
        except BaseException:
            self._listener.close()
            raise
        self._acceptor = Acceptor(self._listener, self._serve, CONNECTIONS)

    def start(self) -> LocalAddress:
        """Start serving and return the address."""
        self._acceptor.start()
        return LocalAddress(*self._listener.getsockname())

    async def stop(self) -> None:
        """End every connection and stop listening."""
        await self._acceptor.stop()
        self._listener.close()

    async def _serve(self, connection: socket.socket) -> None:
        """Forward one connection; if nothing listens in the sandbox, the client's connection is reset."""
        try:
            async with self._stock.connected(self._port) as there:
                await _join(connection, there)
        except (OSError, TimeoutError) as error:
            _log.debug("a connection to port %d of a sandbox ended: %s", self._port, error)


async def _join(here: socket.socket, there: socket.socket) -> None:
    with closing(await Stream.over(here)) as client, closing(await Stream.over(there)) as sandbox:
        await both_ways(client, sandbox, _any, _any)


def _any(size: int) -> None:
    """Ignore the number of forwarded bytes: no limit applies, because the client is on this machine."""
