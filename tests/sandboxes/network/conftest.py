"""Sandboxes with their own network, and servers on this machine that they talk to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentgym.sandboxes.docker.docker import Docker
from agentgym.sandboxes.local.local import Bubblewrap
from agentgym.sandboxes.protocol import SandboxSpec
from tests.sandboxes.conftest import ISOLATED, make


@pytest.fixture(params=ISOLATED)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the name of each kind of sandbox that has its own network and runs here."""
    make(request.param)
    return str(request.param)


def sandbox_of(kind: str, **settings: Any) -> SandboxSpec:
    """Return the settings of a sandbox of that kind."""
    return Bubblewrap(**settings) if kind == "bubblewrap" else Docker(**settings)


@dataclass
class Host:
    """A server on this machine that answers each connection with one text and stores the data it received."""

    port: int = 0
    got: list[bytes] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def host(answer: bytes = b"hello") -> AsyncIterator[Host]:
    """Start a server that answers as soon as a request's headers end, or immediately if the data isn't HTTP."""
    made = Host()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.got.append(await reader.read(65536))
        length = b"Content-Length: %d" % len(answer)
        writer.write(b"\r\n".join([b"HTTP/1.1 200 OK", length, b"Connection: keep-alive", b"", answer]))
        await writer.drain()
        while more := await reader.read(65536):
            made.got.append(more)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
