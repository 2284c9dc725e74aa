"""Sandboxes in Docker containers: no network, read-only root, no capabilities, limited memory and processes."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from agentgym.config_fields import config
from agentgym.errors import SandboxError
from agentgym.machine.finished import finished
from agentgym.sandboxes.docker.client import EngineDown, EngineFailed, address, connect, translated
from agentgym.sandboxes.docker.engine import Engine
from agentgym.sandboxes.docker.images.names import default_image, image_digest
from agentgym.sandboxes.docker.settings import GVISOR, GVISOR_LACKS, DockerSettings
from agentgym.sandboxes.pool import open_pool
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.sandboxes.protocol.arguments import check_size
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.sandboxes.volumes import check_sockets

RETRIES = 2
DOWN_S = 0.5
"""Seconds before an engine that did not answer, or failed, is tried again."""
PATIENCE_S = 60.0
_log = logging.getLogger("agentgym.sandboxes")


@config(frozen=True, kw_only=True)
class Docker(DockerSettings):
    """Sandboxes in Docker containers; sandbox/README.md lists the attacks that they stop."""

    def open(self, size: int) -> AbstractAsyncContextManager[SandboxPool]:
        """Open a pool of containers, which are removed when the `async with` block ends.

        A lease starts a container in about 200 ms if none is free. While an engine is down, leases use the other
        engines in `hosts`. If all engines are down, a lease waits up to a minute. Calls to sandboxes that were running
        on an engine that went down raise SandboxError.

        Args:
            size: Maximum number of containers leased at once.

        Raises:
            ValueError: If `size` is not an int of at least 1, or, when the block is entered, if a volume contains a
                socket.
            SandboxError: When the block is entered, if no engine answers, or an image or setting is unusable.
        """
        check_size(size)
        if self.runtime == GVISOR:
            _warn_once(GVISOR_LACKS)
        return self._open(size)

    @asynccontextmanager
    async def _open(self, size: int) -> AsyncIterator[SandboxPool]:
        engines = [Engine(host) for host in self.hosts or (address(),)]
        try:
            await _prepare(engines, self)
            async with open_pool(
                functools.partial(self._start, engines), size, functools.partial(_sweep, engines)
            ) as pool:
                yield pool
        finally:
            await finished(_close(engines))

    async def _start(self, engines: Sequence[Engine]) -> RemoteSandbox:
        """Start a sandbox on the engine that has the fewest sandboxes, and retry if that engine is down or fails.

        A retry prefers another engine. The error is raised after a minute, or once engines have failed three times.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + PATIENCE_S
        failures = 0
        while True:
            now = clock()
            engine = min(engines, key=lambda engine: (engine.down_until > now, engine.sandboxes))
            try:
                return await engine.start(self)
            except (EngineDown, EngineFailed) as error:
                failures += isinstance(error, EngineFailed)
                engine.down_until = clock() + DOWN_S
                if failures > RETRIES or clock() > deadline:
                    raise
            if all(engine.down_until > clock() for engine in engines):
                await asyncio.sleep(DOWN_S)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


async def _prepare(engines: Sequence[Engine], spec: Docker) -> None:
    """Prepare every engine for sandboxes of this spec, and log a warning for each engine that is down.

    Raises:
        EngineDown: If no engine answers; the error is the first engine's.
        ValueError: If a volume contains a socket.
    """
    if all(engine.is_here for engine in engines):  # Otherwise, the volumes are on another machine.
        await asyncio.to_thread(check_sockets, spec.volumes)
    down: list[EngineDown] = []
    for engine in engines:
        try:
            await engine.prepare(spec)
        except EngineDown as error:
            _log.warning("%s", str(error))
            down.append(error)
    if len(down) == len(engines):
        raise down[0]


async def _close(engines: Sequence[Engine]) -> None:
    async with AsyncExitStack() as ends:  # Closes every engine's client, even if one fails.
        for engine in engines:
            ends.push_async_callback(engine.close)


async def _sweep(engines: Sequence[Engine]) -> None:
    for engine in engines:
        try:
            await engine.do(engine.sweep)
        except SandboxError as error:
            _log.warning("could not remove leftover containers: %s", str(error))


def why_no_docker(image: str | None = None) -> str | None:
    """Return why Docker sandboxes can't run here, or None if they can.

    Args:
        image: The image to look for; None for this version's default image.
    """

    def probe() -> None:
        with connect(timeout_s=5) as client:
            image_digest(client, image or default_image())

    try:
        translated(probe)
    except SandboxError as error:
        return str(error)
    return None
