"""A listener that serves a few connections at a time and can drop those that are waiting."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

BACKLOG = 64
PAUSE_S = 0.2
"""Seconds without accepting connections after this process failed to open a file."""
_log = logging.getLogger("agentgym.sandboxes")


class Acceptor:
    """Accepts connections from a listener, and serves at most `limit` of them at once.

    Further connections wait without using up open files of this process. Everything runs in one event loop.
    """

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], Awaitable[None]], limit: int) -> None:
        self._listener, self._serve, self._limit = listener, serve, limit
        self._connections: dict[asyncio.Task[None], socket.socket] = {}
        self._listening = self._stopped = False
        listener.setblocking(False)

    def start(self) -> None:
        """Start accepting connections in the running event loop."""
        if not self._listening and not self._stopped:
            self._listening = True
            asyncio.get_running_loop().add_reader(self._listener, self._ready)

    async def stop(self) -> None:
        """End every connection; the listener stays open, and connections that have not been accepted keep waiting."""
        self._stopped = True
        self._pause()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _pause(self) -> None:
        if self._listening:
            self._listening = False
            asyncio.get_running_loop().remove_reader(self._listener)

    def _ready(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            _log.warning("cannot accept the connections of a sandbox, so they wait: %s", error)
            self._pause()
            asyncio.get_running_loop().call_later(PAUSE_S, self.start)
            return
        connection.setblocking(False)
        task = asyncio.ensure_future(self._serve(connection))
        self._connections[task] = connection
        task.add_done_callback(self._ended)
        if len(self._connections) >= self._limit:
            self._pause()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # A callback, because an asyncio task that is cancelled before its first step runs no code of its own.
        self._connections.pop(task).close()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a connection of a sandbox failed", exc_info=task.exception())
        if not self._stopped:
            self.start()


def forget_waiting(listener: socket.socket) -> int:
    """Reset the connections that wait to be accepted, restart listening, and return how many were waiting.

    Connections with unfinished handshakes are dropped, too, but can't be counted. If they were not dropped, they would
    be let in later, because the kernel keeps sending the data of a client that has ended. Call this only while nobody
    can reach the port.
    """
    waiting = 0
    with suppress(OSError):  # If none is waiting, or no more files can be opened; the rest isn't counted.
        while True:
            listener.accept()[0].close()
            waiting += 1
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Closed connections still occupy its port.
    listener.shutdown(socket.SHUT_RD)
    listener.listen(BACKLOG)
    return waiting
