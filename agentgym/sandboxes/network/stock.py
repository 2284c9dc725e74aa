"""Sockets of a sandbox's network, created by its server, with which the host connects to ports in the sandbox."""

import asyncio
import ctypes
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from urllib.parse import SplitResult

from agentgym.sandboxes.network.streams import Stream

CONNECT_S = 10.0
READY_EVERY_S = 0.02
_libc = ctypes.CDLL(None, use_errno=True)
_NOWHERE = ctypes.create_string_buffer(struct.pack("=H14x", socket.AF_UNSPEC))


class Stock:
    """Connects to 127.0.0.1 inside the sandbox, with one connection per socket at a time; further connections wait.

    A socket can be connected again and again. Everything runs in one event loop.
    """

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._all = list(sockets)
        self._free: asyncio.Queue[socket.socket] = asyncio.Queue()
        for each in sockets:
            each.setblocking(False)
            self._free.put_nowait(each)

    @asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator[socket.socket]:
        """Yield a socket that is connected to the port.

        Raises:
            OSError: If nothing in the sandbox accepts the connection.
            TimeoutError: If it takes too long.
        """
        one = await self._free.get()
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
            yield one
        finally:
            disconnect(one)
            self._free.put_nowait(one)

    async def answers(self, port: int, url: SplitResult | None) -> bool:
        """Return whether something accepts connections on the port and, if a URL is given, answers it.

        The status of the answer must be below 400.
        """
        try:
            async with self.connected(port) as connection:
                return url is None or await _status(connection, url) < 400
        except OSError:
            return False

    async def wait_for(self, port: int, timeout_s: float, url: SplitResult | None = None) -> None:
        """Return when something listens on the port and, if a URL is given, answers it with a status below 400.

        Raises:
            TimeoutError: If that takes longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.answers(port, url):  # noqa: ASYNC110 - the sandbox sends no event for it
                    await asyncio.sleep(READY_EVERY_S)
        except TimeoutError:
            raise TimeoutError(f"nothing listens on port {port} of the sandbox after {timeout_s:g} s") from None

    def close(self) -> None:
        """Close every socket."""
        for each in self._all:
            each.close()


async def _status(connection: socket.socket, url: SplitResult) -> int:
    """Return the status of the response to a GET request, or 999 if the response is not HTTP."""
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    with closing(await Stream.over(connection)) as stream:
        stream.writer.write(f"GET {path} HTTP/1.0\r\nHost: {url.netloc}\r\n\r\n".encode())
        try:
            words = (await stream.reader.readline()).split()
        except ValueError:
            return 999  # A line that does not end.
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 999


def disconnect(connection: socket.socket) -> None:
    """Dissolve a TCP socket's connection so that it can connect again; unread and unsent data is discarded."""
    if _libc.connect(connection.fileno(), _NOWHERE, len(_NOWHERE.raw)) != 0:
        number = ctypes.get_errno()
        if number != errno.ENOTCONN:
            raise OSError(number, os.strerror(number))
