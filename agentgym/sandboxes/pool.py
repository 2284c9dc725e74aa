"""A pool of started sandboxes: each is leased clean, always taken back, and reset before its next lease."""

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
"""Seconds after which a lease that waits for a free sandbox is said to wait."""
_log = logging.getLogger("agentgym.sandboxes")


class Pool:
    """At most `size` sandboxes, started when first needed; implements `types.SandboxPool`.

    A sandbox goes back through a verified reset, in the background: a lease ends at once, also on cancellation.
    One that is broken, worn or slow to clean is closed, and its place is started anew by the next lease.
    """

    def __init__(self, start: Callable[[], Awaitable[RemoteSandbox]], size: int) -> None:
        check_size(size)
        self._start = start
        self._size = size
        self._places = asyncio.Semaphore(size)
        self._out = 0
        """The places that are taken: by sandboxes that are leased, being started or being cleaned."""
        self._idle: deque[RemoteSandbox] = deque()
        self._episodes: dict[RemoteSandbox, int] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Future[None]] = set()
        self._has_said = False
        self._closed = False
        self._lifetime = Lifetime("the pool")
        self.started = self.ended = self.unclean = 0
        """Counts of sandboxes: started, ended, and ended because a reset did not make them clean."""

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """Lease a clean sandbox, waiting for a free one.

        SandboxError where none can be started, ClosedError where the pool is closed. The sandbox's calls raise that,
        too, when the lease has ended.
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
        """End every sandbox, leased and starting ones too; none is left behind however often this call is cancelled."""
        await finished(self._end_all())

    async def _end_all(self) -> None:
        self._closed = True
        self._lifetime.end("the block of the pool ended")
        for sandbox in self._episodes:
            sandbox.cut()
        sandboxes = list(self._episodes)
        self._episodes.clear()
        self._idle.clear()
        self.ended += len(sandboxes)
        async with asyncio.TaskGroup() as ends:
            for returning in self._returning:
                ends.create_task(_settled(returning))  # Its wire is cut: no reset holds it up.
            for starting in self._starting:
                ends.create_task(_settled(starting))  # It has been interrupted.
            for sandbox in sandboxes:
                ends.create_task(_ended(sandbox))

    async def resize(self, size: int) -> None:
        """Let the pool have `size` sandboxes; a smaller one waits until so many leases have ended, and ends idle
        sandboxes."""
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
        """End sandboxes that are idle for long, that died, and those of abandoned leases."""
        now = asyncio.get_running_loop().time()
        for sandbox in list(self._idle):
            # Ending one takes a while, and meanwhile another may have been leased.
            stale = sandbox in self._idle and (sandbox.broken or now - sandbox.link.used > IDLE_S)
            if stale and not self._places.locked():
                self._idle.remove(sandbox)
                # It keeps its place until it is gone: a lease that began another one meanwhile would be one too many.
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
            raise SandboxError(f"{SANDBOX_LOST}: starting a sandbox: {why}") from error
        finally:
            self._starting.discard(starting)
            starting.set_result(None)

    @contextmanager
    def _said_when_slow(self) -> Iterator[None]:
        """Log, once for a pool, that a lease waits for long, and what to do."""
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
        """Whether the sandbox may be leased again."""
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
        """End the sandbox; only then may another one take its place."""
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
    """Yield the pool; it is maintained every minute, and closed at the end of the block."""
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
