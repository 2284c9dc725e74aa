"""Boxes for envs whose tasks need different ones: pools that share one bound on the number of boxes."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast, runtime_checkable

from agentgym.environments.env import Env
from agentgym.errors import EnvError, boundary
from agentgym.sandboxes.protocol import Box, Boxes, Lifetime, Sandbox
from agentgym.sandboxes.protocol.arguments import check_size


@runtime_checkable
class Resizable(Protocol):
    """A pool whose number of boxes can be changed while it is open."""

    async def resize(self, size: int) -> None:
        """Let it have at most `size` boxes, leased ones included; idle ones above that are ended."""
        ...


class OpenPool:
    """One sandbox's open pool, which a task of its own opens and closes."""

    def __init__(self, sandbox: Sandbox, size: int) -> None:
        self.sandbox = sandbox
        self.leased = 0
        self.held = 0
        """The most boxes that it may have: those that are leased, and those that wait for the next lease."""
        self.used = 0
        """The number of its last lease."""
        self.size = size
        self.ready: asyncio.Future[Boxes] = asyncio.get_running_loop().create_future()
        self._close = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def idle(self) -> int:
        """The most boxes that it has beside those that are leased."""
        return self.held - self.leased

    async def _run(self) -> None:
        try:
            async with self.sandbox.open(self.size) as boxes:
                if isinstance(boxes, Resizable):
                    await boxes.resize(self.held)
                self.ready.set_result(boxes)
                await self._close.wait()
        except BaseException as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)
            self.ready.exception()  # Whoever waits gets it; where nobody does, it is nobody's.

    @property
    def resizable(self) -> Resizable | None:
        """The pool, where it is open and its number of boxes can be changed."""
        opened = self.ready.result() if self.ready.done() and self.ready.exception() is None else None
        return opened if isinstance(opened, Resizable) else None

    @property
    def can_shrink(self) -> bool:
        """Whether one of its idle boxes can be ended: of a foreign pool all boxes at once, when none is leased."""
        return self.idle > 0 and (self.resizable is not None or not self.leased)

    async def grow(self) -> None:
        """Let it have one box more."""
        self.held += 1
        if (pool := self.resizable) is not None:
            await pool.resize(self.held)

    async def shrink(self) -> None:
        """End one idle box, or close the pool where it cannot end a single one."""
        if (pool := self.resizable) is not None:
            await pool.resize(self.held - 1)
            self.held -= 1
        else:
            self.held = 0
            await self.close()

    async def close(self) -> None:
        """Close the pool, and raise what its closing raised."""
        self._close.set()
        await asyncio.shield(self._task)


class TaskBoxes:
    """Pools of several sandboxes with at most `size` boxes in all; implements `Boxes`.

    A pool is opened by the first lease of its sandbox. Leases begin in the order in which they are asked for, whatever
    sandbox they are for. Where all places are taken, an idle box of the sandbox that was leased longest ago makes room.
    """

    def __init__(self, size: int, sandbox: Sandbox | None = None) -> None:
        check_size(size)
        self._size = size
        self._sandbox = sandbox
        self._leases = asyncio.Semaphore(size)
        self._moving = asyncio.Lock()
        self._ended = asyncio.Event()
        self._pools: list[OpenPool] = []
        self._count = 0
        self._lifetime = Lifetime("the pool")

    def lease(self, sandbox: Sandbox | None = None) -> AbstractAsyncContextManager[Box]:
        """Lease a clean box of that sandbox, or of the default one, waiting for a place.

        :raises SandboxError: where its pool cannot be opened, or no box be started.
        :raises ClosedError: where the pools are closed.
        """
        wanted = sandbox if sandbox is not None else self._sandbox
        if wanted is None:
            raise ValueError("sandbox: name one; these boxes have no default")
        return self._lease(wanted)

    async def close(self) -> None:
        """Close all pools; the first error of one is raised when all are closed."""
        self._lifetime.end("the block of the pool ended")
        pools, self._pools = self._pools, []
        results = await asyncio.gather(*(pool.close() for pool in pools), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    @asynccontextmanager
    async def _lease(self, sandbox: Sandbox) -> AsyncIterator[Box]:
        with self._lifetime.call():
            await self._leases.acquire()
        try:
            with self._lifetime.call():
                async with self._moving:
                    pool = await self._place(sandbox)
            try:
                async with (await asyncio.shield(pool.ready)).lease() as box:
                    yield box
            finally:
                pool.leased -= 1
                if pool in self._pools and pool.ready.done() and pool.ready.exception() is not None:
                    self._pools.remove(pool)  # The next lease opens it anew.
                self._ended.set()
        finally:
            self._leases.release()

    async def _place(self, sandbox: Sandbox) -> OpenPool:
        """A pool with a place for one more lease: fewer than `size` are leased, so that one is free or idle."""
        pool = self._pool_of(sandbox)
        if pool is None or not pool.idle:
            while sum(each.held for each in self._pools) >= self._size:
                await self._make_room()
            pool = self._pool_of(sandbox)
            if pool is None:
                pool = OpenPool(sandbox, self._size)
                self._pools.append(pool)
            await pool.grow()
        pool.leased += 1
        self._count += 1
        pool.used = self._count
        return pool

    async def _make_room(self) -> None:
        """End a box of the pool that was used longest ago; wait for the end of a lease where none can be ended now."""
        can_shrink = [pool for pool in self._pools if pool.can_shrink]
        if not can_shrink:
            self._ended.clear()
            await self._ended.wait()
            return
        pool = min(can_shrink, key=lambda pool: pool.used)
        try:
            await pool.shrink()
        finally:
            if not pool.held and pool in self._pools:
                self._pools.remove(pool)
                await pool.close()

    def _pool_of(self, sandbox: Sandbox) -> OpenPool | None:
        return next((pool for pool in self._pools if pool.sandbox == sandbox), None)


@asynccontextmanager
async def open_boxes(env: type[Env[Any]], size: int, sandbox: Sandbox | None = None) -> AsyncIterator[Boxes | None]:
    """Yield at most `size` boxes for an env's rollouts; None where it declares no sandbox.

    `sandbox` takes the place of what the env declares, for all its tasks.
    """
    if sandbox is None and chooses(env):
        boxes = TaskBoxes(size, env.sandbox)
        try:
            yield boxes
        finally:
            await boxes.close()
        return
    wanted = sandbox if sandbox is not None else env.sandbox
    if wanted is None:
        yield None
        return
    async with wanted.open(size) as pool:
        yield pool


def declares_boxes(env: type[Env[Any]]) -> bool:
    """Whether rollouts of the env may have a box."""
    return env.sandbox is not None or chooses(env)


def chooses(env: type[Env[Any]]) -> bool:
    """Whether the env chooses a sandbox for each task."""
    return getattr(env.sandbox_for, "__func__", None) is not getattr(Env.sandbox_for, "__func__", None)


def sandbox_of(env: type[Env[Any]], task: Any) -> Sandbox | None:
    """Return the sandbox that the env chooses for the task; EnvError where its choice fails or is no sandbox."""
    with boundary(EnvError, f"{env.__name__}.sandbox_for"):
        sandbox: Any = env.sandbox_for(task)
        if inspect.iscoroutine(sandbox):
            sandbox.close()
        if sandbox is None or (callable(getattr(sandbox, "open", None)) and not isinstance(sandbox, type)):
            return cast("Sandbox | None", sandbox)
        raise TypeError(f"it must return a sandbox, such as `ag.AnyBox()`, or None for no box, got {sandbox!r:.200}")


def check_boxes(boxes: Any) -> None:
    """Raise TypeError where something else is given as open boxes, such as a sandbox that is not open."""
    if boxes is None or hasattr(boxes, "lease"):
        return
    how = "open it: `async with BOX.open(4) as boxes`" if hasattr(boxes, "open") else "leave it out, or open a sandbox"
    raise TypeError(f"boxes: must be an open pool of boxes, got {boxes!r:.80}; {how}")


def lease_for(boxes: Boxes, sandbox: Sandbox) -> AbstractAsyncContextManager[Box]:
    """Lease a box of that sandbox where the boxes are of several; a pool of one kind leases what it has."""
    return boxes.lease(sandbox) if isinstance(boxes, TaskBoxes) else boxes.lease()
