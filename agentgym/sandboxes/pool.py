"""Warm boxes: leased clean, taken back always, reset before anybody else sees them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agentgym.errors import SandboxError
from agentgym.sandboxes.base import LOST, RemoteBox, exhausted, is_exhausted
from agentgym.types import Box

EPISODES_PER_BOX = 200
IDLE_S = 600.0
LEASE_S = 3600.0
"""A lease without a call for so long has lost its holder."""
LIFE_S = 6 * 3600.0
TEND_S = 60.0
SLOW_RESET_S = 1.0


class Pool:
    """At most `size` boxes, started when first needed; implements `types.Boxes`.

    A box goes back through a verified reset, in the background: a lease ends at once, also on cancellation.
    One that is broken, worn or slow to clean is closed, and its place is started anew by the next lease.
    """

    def __init__(self, start: Callable[[], Awaitable[RemoteBox]], size: int) -> None:
        if size < 1:
            raise ValueError(f"size: {size} boxes")
        self._start = start
        self._places = asyncio.Semaphore(size)
        self._idle: deque[RemoteBox] = deque()
        self._episodes: dict[RemoteBox, int] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Box]:
        """A clean box; waits for a free one. SandboxError when none can be started or the pool is closed."""
        await self._places.acquire()
        try:
            box = await self._take()
        except BaseException:
            self._places.release()
            raise
        try:
            yield box
        finally:
            returning = asyncio.create_task(self._take_back(box))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    async def close(self) -> None:
        """End every box, leased ones too; nothing is left behind even where this is cancelled."""
        self._closed = True
        for box in self._episodes:
            box.cut()
        boxes = list(self._episodes)
        self._episodes.clear()
        self._idle.clear()
        async with asyncio.TaskGroup() as ends:
            for returning in self._returning:
                ends.create_task(_settled(returning))  # Its wire is cut: no reset holds it up.
            for box in boxes:
                ends.create_task(box.close())

    async def tend(self) -> None:
        """End boxes that nobody has used for long, that died, and those of leases without a call."""
        now = asyncio.get_running_loop().time()
        for box in list(self._idle):
            # Ending one takes a while, and meanwhile another may have been leased.
            if box in self._idle and (box.broken or now - box.link.used > IDLE_S):
                self._idle.remove(box)
                await self._drop(box)
        for box in self._episodes:
            if now - box.link.used > LEASE_S:
                box.link.cut(f"its lease made no call for {LEASE_S:.0f} s")

    async def _take(self) -> RemoteBox:
        if self._closed:
            raise SandboxError("the pool is closed")
        while self._idle:
            box = self._idle.pop()
            if not box.broken:
                return box
            await self._drop(box)
        box = await self._new()
        self._episodes[box] = 0
        if self._closed:
            await self._drop(box)
            raise SandboxError("the pool is closed")
        return box

    async def _new(self) -> RemoteBox:
        try:
            return await self._start()
        except Exception as error:
            why = exhausted() if is_exhausted(error) else str(error) or type(error).__name__
            raise SandboxError(f"{LOST}: starting a box: {why}") from error

    async def _take_back(self, box: RemoteBox) -> None:
        try:
            if await self._clean(box):
                self._idle.append(box)
            else:
                await self._drop(box)
        finally:
            self._places.release()

    async def _clean(self, box: RemoteBox) -> bool:
        """Whether it may be leased again."""
        if self._closed or box.broken or box.link.worn or box not in self._episodes:
            return False
        self._episodes[box] += 1
        clock = asyncio.get_running_loop().time
        began = clock()
        if self._episodes[box] >= EPISODES_PER_BOX or began - box.link.born > LIFE_S:
            return False
        try:
            await box.reset()
        except SandboxError:
            return False
        return clock() - began < SLOW_RESET_S and not self._closed

    async def _drop(self, box: RemoteBox) -> None:
        self._episodes.pop(box, None)
        await box.close()


async def _settled(task: "asyncio.Task[None]") -> None:
    await asyncio.wait({task})


@asynccontextmanager
async def open_pool(
    start: Callable[[], Awaitable[RemoteBox]], size: int, sweep: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[Pool]:
    """A pool that is tended every minute, and closed when the block ends, however it ends."""
    pool = Pool(start, size)
    tending = asyncio.create_task(_tend(pool, sweep))
    try:
        yield pool
    finally:
        tending.cancel()
        try:
            await pool.close()
        finally:
            await asyncio.wait({tending})


async def _tend(pool: Pool, sweep: Callable[[], Awaitable[None]] | None) -> None:
    while True:
        await asyncio.sleep(TEND_S)
        await pool.tend()
        if sweep is not None:
            await sweep()
