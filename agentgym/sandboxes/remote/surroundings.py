"""The calls of a sandbox that reach beyond it: its network, forwarded ports, services, and snapshots."""

import asyncio
from pathlib import Path

from agentgym.machine.finished import finished
from agentgym.sandboxes.host_files import new_file, open_snapshot
from agentgym.sandboxes.network.sandbox_network import Networked
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.remote.calls import Calls

PART = 1 << 20


class Surroundings(Calls, Networked):
    """The parts that a sandbox shares with its branches: the network, the log of requests, and the services."""

    async def _snapshot(self, path: Path, limit: int, timeout_s: float) -> None:
        size = 0
        with new_file(path, "path") as out:

            async def take(part: bytes) -> bytes:
                nonlocal size
                size += len(part)
                if size > limit:
                    raise WrongContent(f"the snapshot exceeds the limit of {limit} bytes; pass a larger limit=")
                await finished(asyncio.ensure_future(asyncio.to_thread(out.write, part)))
                return b""

            await self._call("snapshot", b"", timeout_s, carry=take)

    async def _restore(self, path: Path, timeout_s: float) -> None:
        with await asyncio.to_thread(open_snapshot, path) as file:

            async def give(_: bytes) -> bytes:
                return await asyncio.to_thread(file.read, PART)

            await self._call("restore", b"", timeout_s, carry=give)

    async def begin_surroundings(self) -> None:
        """Start the proxy and the services of an episode in a clean sandbox.

        Raises:
            SandboxError: If a service does not start, in which case the sandbox is broken.
        """
        try:
            await self.network.begin()
        except BaseException as error:
            self.link.cut(f"its proxy and services could not be started: {error}")
            raise
