"""The calls of a box that reach beyond it: its network, forwarded ports, the services beside it, and snapshots."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentgym.machine.finished import finished
from agentgym.sandboxes.host_files import new_file, open_snapshot
from agentgym.sandboxes.network.box_network import BoxNetwork
from agentgym.sandboxes.protocol import BoxService, LocalAddress, NetworkRequest
from agentgym.sandboxes.protocol.arguments import check_limit, check_path_here, check_timeout
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.remote.calls import Calls

PART = 1 << 20
SNAPSHOT_S = 120.0


class Surroundings(Calls):
    """What a box and its branches share: one network, one log of requests, the same services."""

    network: BoxNetwork

    def requests(self) -> Sequence[NetworkRequest]:
        """Return every request of this episode to the box's proxy, in order; empty where `network` is no allow-list."""
        self.lifetime.check()
        return self.network.requests()

    @asynccontextmanager
    async def port(self, port: int, *, timeout_s: float = 10.0) -> AsyncIterator[LocalAddress]:
        """Lend an address of this machine that leads to 127.0.0.1:port in the box, once something listens there.

        At most 32 connections at once, more wait. TimeoutError where nothing listens in time, ValueError where the box
        has no network of its own.
        """
        check_timeout(timeout_s)
        self.lifetime.check()
        async with self.network.port(port, timeout_s) as address:
            yield address

    def service(self, name: str) -> BoxService:
        """Return the container of that name beside the box; ValueError where there is none."""
        self.lifetime.check()
        return self.network.service(name)

    async def snapshot(self, path: str | Path, *, limit: int = 1 << 30, timeout_s: float = SNAPSHOT_S) -> None:
        """Write the working folder to a tar file on this machine: exact modes, times, links, hard links and sizes.

        Everything else in the box is stopped meanwhile; pipes and sockets are left out. ValueError over `limit` bytes,
        over `timeout_s`, and where the folder is over 100 folders deep; no file is written then.
        """
        check_path_here("path", path)
        check_limit("limit", limit)
        size = 0
        with new_file(Path(path)) as out:

            async def take(part: bytes) -> bytes:
                nonlocal size
                size += len(part)
                if size > limit:
                    raise WrongContent(f"the snapshot has over {limit} bytes, which is the limit; pass a larger limit=")
                await finished(asyncio.ensure_future(asyncio.to_thread(out.write, part)))
                return b""

            await self._call("snapshot", b"", timeout_s, carry=take)

    async def restore(self, path: str | Path, *, timeout_s: float = SNAPSHOT_S) -> None:
        """Replace the working folder's content by that of a snapshot, which may come from another box.

        ValueError for a file that is no snapshot, or is cut off; the folder stays as it is then. What is in it is
        unpacked inside the box, which follows no link: ValueError for what leads out of the folder, does not fit or
        takes over `timeout_s`; the folder is empty then, or as empty as 5 s can make it.
        """
        check_path_here("path", path)
        self.lifetime.check()
        with await asyncio.to_thread(open_snapshot, Path(path)) as file:

            async def give(_: bytes) -> bytes:
                return await asyncio.to_thread(file.read, PART)

            await self._call("restore", b"", timeout_s, carry=give)

    async def begin_surroundings(self) -> None:
        """Begin an episode beside a clean box; SandboxError, and a broken box, where a service does not start."""
        try:
            await self.network.begin()
        except BaseException as error:
            self.link.cut(f"what stands beside it could not be started anew: {error}")
            raise
