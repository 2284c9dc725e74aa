"""A pool of running sandboxes: each is clean when leased, always taken back, and reset before its next lease."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from agentgym.errors import SandboxError
from agentgym.machine.finished import finished
from agentgym.sandboxes.faults import exhausted, is_exhausted
from agentgym.sandboxes.protocol import Lifetime, Sandbox
from agentgym.sandboxes.protocol.arguments import check_size
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST
from agentgym.sandboxes.remote.sandbox import RemoteSandbox

EPISODES_PER_SANDBOX = 200
IDLE_S = 600.0
LEASE_S = 3600.0
"""Seconds without a call after which a lease counts as abandoned."""
LIFE_S = 6 * 3600.0
TEND_S = 60.0
SLOW_RESET_S = 1.0
SLOW_LEASE_S = 60.0
"""Seconds that a lease waits for a free sandbox before a warning is logged."""
_log = logging.getLogger("agentgym.sandboxes")


class Pool:
    """At most `size` sandboxes, each started when first needed; implements `SandboxPool`.

    A returned sandbox goes through a verified reset in the background, so a lease ends at once, even on cancellation.
    A sandbox that is broken, old, slow to clean or has had many leases is closed, and the next lease starts a new one
    in its place.

    Args:
        start: Starts a sandbox.
        size: Maximum number of sandboxes.

    Raises:
        ValueError: If `size` is not an int of at least 1.
    """

    def __init__(self, start: Callable[[], Awaitable[RemoteSandbox]], size: int) -> None:
        check_size(size)
        self._start = start
        self._size = size
        self._places = asyncio.Semaphore(size)
        self._out = 0
        """Number of sandboxes that are leased, starting or being cleaned; each takes one of the `size` places."""
        self._idle: deque[RemoteSandbox] = deque()
        self._episodes: dict[RemoteSandbox, int] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Future[None]] = set()
        self._has_said = False
        self._closed = False
        self._lifetime = Lifetime("the pool")
        self.started = self.ended = self.unclean = 0
        """Counts of sandboxes: started, ended, and ended because a reset did not clean them."""

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """Lease a clean sandbox, waiting for a free one if necessary.

        Once the lease has ended, the sandbox's calls raise ClosedError.

        Raises:
            SandboxError: If no sandbox can be started.
            ClosedError: If the pool is closed.
        """
        with self._said_when_slow(), self._lifetime.call():
            await self._places.acquire()
        self._out += 1
        try:
            with self._lifetime.call():
                sandbox = await self._take()
        except BaseException:
            self._free_place()
            raise
        leased = sandbox.leased(self._lifetime)
        try:
            yield leased
        finally:
            leased.lifetime.end("its lease ended")
            returning = asyncio.create_task(self._take_back(sandbox))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    async def close(self) -> None:
        """End every sandbox, including leased and starting ones.

        None survives, however often this call is cancelled.
        """
        await finished(self._end_all())

    async def _end_all(self) -> None:
        self._closed = True
        self._lifetime.end("the `async with` block of the pool ended")
        for sandbox in self._episodes:
            sandbox.cut()
        sandboxes = list(self._episodes)
        self._episodes.clear()
        self._idle.clear()
        self.ended += len(sandboxes)
        async with asyncio.TaskGroup() as ends:
            for returning in self._returning:
                ends.create_task(_settled(returning))  # The sandbox's connection is cut, so its reset ends soon.
            for starting in self._starting:
                ends.create_task(_settled(starting))  # The start has been interrupted.
            for sandbox in sandboxes:
                ends.create_task(_ended(sandbox))

    async def resize(self, size: int) -> None:
        """Change the maximum number of sandboxes.

        Shrinking ends idle sandboxes, and waits until enough leases have ended.

        Args:
            size: New maximum number of sandboxes.

        Raises:
            ClosedError: If the pool is closed.
        """
        self._lifetime.check()
        while self._size < size:
            self._size += 1
            self._places.release()
        while self._size > size:
            await self._places.acquire()
            self._size -= 1
            if len(self._idle) + self._out > self._size:
                await self._drop(self._idle.popleft())

    async def maintain(self) -> None:
        """End sandboxes that have been idle too long or have died, and cut off those of abandoned leases."""
        now = asyncio.get_running_loop().time()
        for sandbox in list(self._idle):
            # Ending a sandbox takes a while; another one may have been leased meanwhile.
            stale = sandbox in self._idle and (sandbox.broken or now - sandbox.link.used > IDLE_S)
            if stale and not self._places.locked():
                self._idle.remove(sandbox)
                # The sandbox keeps its place in the pool until it is gone. Otherwise, a lease could start another one
                # meanwhile, and there would be more than `size`.
                async with self._places:
                    await self._drop(sandbox)
        for sandbox in self._episodes:
            if now - sandbox.link.used > LEASE_S:
                sandbox.link.cut(f"its lease made no call for {LEASE_S:.0f} s")

    async def _take(self) -> RemoteSandbox:
        self._lifetime.check()
        while self._idle:
            sandbox = self._idle.pop()
            if not sandbox.broken:
                return sandbox
            await self._drop(sandbox)
        sandbox = await self._new()
        self._episodes[sandbox] = 0
        self.started += 1
        if self._closed:
            await self._drop(sandbox)
            raise self._lifetime.error()
        return sandbox

    async def _new(self) -> RemoteSandbox:
        starting = asyncio.get_running_loop().create_future()
        self._starting.add(starting)
        try:
            return await self._start()
        except Exception as error:
            why = exhausted() if is_exhausted(error) else str(error) or type(error).__name__
            raise SandboxError(f"{SANDBOX_LOST}: could not start a sandbox: {why}") from error
        finally:
            self._starting.discard(starting)
            starting.set_result(None)

    @contextmanager
    def _said_when_slow(self) -> Iterator[None]:
        """Log a warning with advice, once per pool, if a lease waits in the `with` block for over SLOW_LEASE_S."""
        saying = asyncio.get_running_loop().call_later(SLOW_LEASE_S, self._say_it_waits)
        try:
            yield
        finally:
            saying.cancel()

    def _say_it_waits(self) -> None:
        if not self._has_said:
            self._has_said = True
            _log.warning(
                "a lease has waited %.0f s: all %d sandboxes of the pool are leased; open it with a larger size, or "
                "end leases sooner",
                SLOW_LEASE_S,
                self._size,
            )

    async def _take_back(self, sandbox: RemoteSandbox) -> None:
        try:
            if await self._clean(sandbox):
                self._idle.append(sandbox)
            else:
                await self._drop(sandbox)
        finally:
            self._free_place()

    def _free_place(self) -> None:
        self._out -= 1
        self._places.release()

    async def _clean(self, sandbox: RemoteSandbox) -> bool:
        """Reset the sandbox and return whether it may be leased again."""
        if self._closed or sandbox.broken or sandbox.link.needs_replacement or sandbox not in self._episodes:
            return False
        self._episodes[sandbox] += 1
        clock = asyncio.get_running_loop().time
        if self._episodes[sandbox] >= EPISODES_PER_SANDBOX or clock() - sandbox.link.created_at > LIFE_S:
            return False
        try:
            await sandbox.reset()
        except Exception as error:
            if not self._closed:
                self.unclean += 1
                _log.warning("ended a sandbox that could not be reset to a clean state: %s", error)
            return False
        return sandbox.reset_s < SLOW_RESET_S and not self._closed

    async def _drop(self, sandbox: RemoteSandbox) -> None:
        """End the sandbox; until it has ended, no other sandbox may take its place."""
        self.ended += self._episodes.pop(sandbox, None) is not None
        await _ended(sandbox)


async def _ended(sandbox: RemoteSandbox) -> None:
    try:
        await sandbox.close()
    except Exception as error:
        _log.warning("could not end a sandbox: %s", error)


async def _settled(task: "asyncio.Future[None]") -> None:
    await asyncio.wait({task})


@asynccontextmanager
async def open_pool(
    start: Callable[[], Awaitable[RemoteSandbox]], size: int, sweep: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[Pool]:
    """Open a pool that is maintained every minute, and closed when the `async with` block ends.

    Args:
        start: Starts a sandbox.
        size: Maximum number of sandboxes.
        sweep: Called after each maintenance, to remove the leftovers of processes that have ended; None for nothing.

    Yields:
        The pool.
    """
    pool = Pool(start, size)
    tending = asyncio.create_task(_tend(pool, sweep))
    try:
        yield pool
    finally:
        tending.cancel()
        await finished(_closed(pool, tending))


async def _closed(pool: Pool, tending: asyncio.Task[None]) -> None:
    try:
        await pool.close()
    finally:
        await asyncio.wait({tending})


async def _tend(pool: Pool, sweep: Callable[[], Awaitable[None]] | None) -> None:
    while True:
        await asyncio.sleep(TEND_S)
        await pool.maintain()
        if sweep is not None:
            await sweep()
