"""Connections to sandboxes over their containers' standard input and output, which Docker calls an attach stream.

They are for engines that share no file system with this machine.
"""

import asyncio
import os
import ssl
import struct
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from agentgym.errors import WireError
from agentgym.sandboxes.remote.wire import Wire

ATTACH_S = 30.0
TCP_PORT = 2375
STDOUT = 1
MAX_WORDS = 2000
_PIECE = struct.Struct(">BxxxI")
REQUEST = (
    "POST /containers/{name}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
    "Host: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
)


async def attach(host: str, name: str) -> Wire:
    """Connect to a sandbox over its container's standard input and output.

    Args:
        host: The engine's address.
        name: The container's name.

    Raises:
        OSError: If the engine can't be reached.
        TimeoutError: If the engine doesn't answer in time.
        WireError: If the engine refuses the stream.
    """
    loop = asyncio.get_running_loop()
    url = urlsplit(host)
    async with asyncio.timeout(ATTACH_S):
        if url.scheme == "unix":
            _, wire = await loop.create_unix_connection(Attached, url.path)
        else:
            # As in the docker package, DOCKER_CERT_PATH alone enables TLS.
            wants_tls = os.environ.get("DOCKER_TLS_VERIFY") or os.environ.get("DOCKER_CERT_PATH")
            tls = _tls() if url.scheme == "https" or wants_tls else None
            _, wire = await loop.create_connection(Attached, url.hostname or "", url.port or TCP_PORT, ssl=tls)
        try:
            await wire.upgrade(name)
        except BaseException:
            wire.close()
            raise
        return wire


def _tls() -> ssl.SSLContext:
    """Return a TLS context with the certificates in DOCKER_CERT_PATH, or else in ~/.docker.

    The engine's certificate is verified only if DOCKER_TLS_VERIFY is set.
    """
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path("~/.docker").expanduser())
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    if not os.environ.get("DOCKER_TLS_VERIFY"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Attached(Wire):
    """Decodes the bytes of an attach stream: an HTTP response, then chunks of the container's output.

    An 8-byte header before each chunk says which output stream the chunk belongs to, and how many bytes it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._raw = bytearray()
        self._words = b""
        """Beginning of the server's standard error, which explains why the server could not start."""
        self._upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def upgrade(self, name: str) -> None:
        """Request the attach stream of the container `name`, and wait until the stream is open."""
        cast("asyncio.Transport", self._transport).write(REQUEST.format(name=name).encode())
        await self._upgraded

    def data_received(self, data: bytes) -> None:
        self._raw += data
        if not self._upgraded.done():
            head, end, _ = self._raw.partition(b"\r\n\r\n")
            if not end:
                return
            del self._raw[: len(head) + len(end)]
            if bytes(head).split(maxsplit=2)[1] not in (b"101", b"200"):
                self._upgraded.set_exception(WireError(head.split(b"\r\n")[0].decode("utf-8", "replace")))
                return
            self._upgraded.set_result(None)
        while len(self._raw) >= _PIECE.size:
            stream, size = _PIECE.unpack_from(self._raw)
            if len(self._raw) < _PIECE.size + size:
                return
            piece = bytes(memoryview(self._raw)[_PIECE.size : _PIECE.size + size])
            del self._raw[: _PIECE.size + size]
            if stream == STDOUT:
                super().data_received(piece)
            else:
                self._words = (self._words + piece)[:MAX_WORDS]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._upgraded.done():
            self._upgraded.set_exception(WireError("the engine closed the connection"))
        said = self._words.decode("utf-8", "replace").strip()
        super().connection_lost(OSError(said) if said else exc)
