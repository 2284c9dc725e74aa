"""Sandboxes for envs whose tasks need different ones: pools that share one limit on the number of sandboxes."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast, runtime_checkable

from agentgym.environments.env import Env
from agentgym.errors import EnvError, boundary
from agentgym.sandboxes.protocol import Lifetime, Sandbox, SandboxPool, SandboxSpec
from agentgym.sandboxes.protocol.arguments import check_size


@runtime_checkable
class Resizable(Protocol):
    """A pool whose number of sandboxes can be changed while it is open."""

    async def resize(self, size: int) -> None:
        """Limit the pool to `size` sandboxes, including leased ones, and terminate idle ones beyond that."""
        ...


class OpenPool:
    """The open pool of one sandbox spec; a separate asyncio task opens and closes it."""

    def __init__(self, spec: SandboxSpec, size: int) -> None:
        self.sandbox_spec = spec
        self.leased = 0
        self.held = 0
        """Maximum number of sandboxes that the pool may have: leased ones, and idle ones kept for the next lease."""
        self.used = 0
        """Serial number of its latest lease, counted over all pools; the least recently used pool has the smallest."""
        self.size = size
        self.ready: asyncio.Future[SandboxPool] = asyncio.get_running_loop().create_future()
        self._close = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def idle(self) -> int:
        """Maximum number of the pool's idle sandboxes: those that it may have, without the leased ones."""
        return self.held - self.leased

    async def _run(self) -> None:
        try:
            async with self.sandbox_spec.open(self.size) as sandboxes:
                if isinstance(sandboxes, Resizable):
                    await sandboxes.resize(self.held)
                self.ready.set_result(sandboxes)
                await self._close.wait()
        except BaseException as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)
            self.ready.exception()  # Waiting callers get the error. If there are none, asyncio must not log it.

    @property
    def resizable(self) -> Resizable | None:
        """The pool, if it is open and its number of sandboxes can be changed; otherwise None."""
        opened = self.ready.result() if self.ready.done() and self.ready.exception() is None else None
        return opened if isinstance(opened, Resizable) else None

    @property
    def can_shrink(self) -> bool:
        """Whether an idle sandbox can be terminated.

        A pool that isn't resizable must have no leases, because it can only terminate all of its sandboxes together.
        """
        return self.idle > 0 and (self.resizable is not None or not self.leased)

    async def grow(self) -> None:
        """Allow one more sandbox."""
        self.held += 1
        if (pool := self.resizable) is not None:
            await pool.resize(self.held)

    async def shrink(self) -> None:
        """Terminate one idle sandbox, or close the pool if it can't terminate a single one."""
        if (pool := self.resizable) is not None:
            await pool.resize(self.held - 1)
            self.held -= 1
        else:
            self.held = 0
            await self.close()

    async def close(self) -> None:
        """Close the pool, and raise any error from closing it."""
        self._close.set()
        await asyncio.shield(self._task)


class TaskSandboxPools:
    """Pools of several specs with at most `size` sandboxes in total; implements `SandboxPool`.

    A pool is opened by the first lease of its spec. Leases are granted in the order of their requests, whatever their
    spec. If all slots are in use, an idle sandbox of the least recently leased spec is terminated to free one.
    """

    def __init__(self, size: int, spec: SandboxSpec | None = None) -> None:
        check_size(size)
        self._size = size
        self._spec = spec
        self._leases = asyncio.Semaphore(size)
        self._moving = asyncio.Lock()
        self._ended = asyncio.Event()
        self._pools: list[OpenPool] = []
        self._count = 0
        self._lifetime = Lifetime("the pool")

    def lease(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """Lease a clean sandbox of that spec, or of the default one, once a slot is free.

        Raises:
            SandboxError: If the pool can't be opened, or no sandbox can be started.
            ClosedError: If the pools are closed.
            ValueError: If there is neither a spec nor a default.
        """
        wanted = spec if spec is not None else self._spec
        if wanted is None:
            raise ValueError("spec: required, because these pools have no default")
        return self._lease(wanted)

    async def close(self) -> None:
        """Close all pools; raise the first error only after all are closed."""
        self._lifetime.end("the `async with` block of the pool ended")
        pools, self._pools = self._pools, []
        results = await asyncio.gather(*(pool.close() for pool in pools), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    @asynccontextmanager
    async def _lease(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        with self._lifetime.call():
            await self._leases.acquire()
        try:
            with self._lifetime.call():
                async with self._moving:
                    pool = await self._place(spec)
            try:
                async with (await asyncio.shield(pool.ready)).lease() as sandbox:
                    yield sandbox
            finally:
                pool.leased -= 1
                if pool in self._pools and pool.ready.done() and pool.ready.exception() is not None:
                    self._pools.remove(pool)  # The next lease opens a new one.
                self._ended.set()
        finally:
            self._leases.release()

    async def _place(self, spec: SandboxSpec) -> OpenPool:
        """Return the spec's pool with one sandbox counted as leased; if all slots are in use, free one first."""
        pool = self._pool_of(spec)
        if pool is None or not pool.idle:
            while sum(each.held for each in self._pools) >= self._size:
                await self._make_room()
            pool = self._pool_of(spec)
            if pool is None:
                pool = OpenPool(spec, self._size)
                self._pools.append(pool)
            await pool.grow()
        pool.leased += 1
        self._count += 1
        pool.used = self._count
        return pool

    async def _make_room(self) -> None:
        """Terminate an idle sandbox of the least recently used pool; if there is none, wait for a lease to end."""
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

    def _pool_of(self, spec: SandboxSpec) -> OpenPool | None:
        return next((pool for pool in self._pools if pool.sandbox_spec == spec), None)


@asynccontextmanager
async def open_sandboxes(
    env: type[Env[Any]], size: int, spec: SandboxSpec | None = None
) -> AsyncIterator[SandboxPool | None]:
    """Yield at most `size` sandboxes for an env's rollouts, or None if it declares no sandbox.

    If `spec` is given, it replaces the env's own declaration for all its tasks.
    """
    if spec is None and chooses(env):
        sandboxes = TaskSandboxPools(size, env.sandbox_spec)
        try:
            yield sandboxes
        finally:
            await sandboxes.close()
        return
    wanted = spec if spec is not None else env.sandbox_spec
    if wanted is None:
        yield None
        return
    async with wanted.open(size) as pool:
        yield pool


def declares_sandboxes(env: type[Env[Any]]) -> bool:
    """Return whether rollouts of the env may have a sandbox."""
    return env.sandbox_spec is not None or chooses(env)


def chooses(env: type[Env[Any]]) -> bool:
    """Return whether the env chooses a spec for each task."""
    return getattr(env.sandbox_for, "__func__", None) is not getattr(Env.sandbox_for, "__func__", None)


def sandbox_of(env: type[Env[Any]], task: Any) -> SandboxSpec | None:
    """Return the spec that the env chooses for the task; raise EnvError if its choice fails or isn't a spec."""
    with boundary(EnvError, f"{env.__name__}.sandbox_for"):
        spec: Any = env.sandbox_for(task)
        if inspect.iscoroutine(spec):
            spec.close()
        if spec is None or (callable(getattr(spec, "open", None)) and not isinstance(spec, type)):
            return cast("SandboxSpec | None", spec)
        raise TypeError(f"must return a sandbox, such as `ag.AnySandbox()`, or None for no sandbox, got {spec!r:.200}")


def check_sandboxes(sandboxes: Any) -> None:
    """Raise TypeError if the argument isn't an open pool, for example because it is a spec."""
    if sandboxes is None or hasattr(sandboxes, "lease"):
        return
    how = (
        "open it: `async with SANDBOX.open(4) as sandboxes`"
        if hasattr(sandboxes, "open")
        else "leave it out, or open a sandbox's pool"
    )
    raise TypeError(f"sandboxes: must be an open pool of sandboxes, got {sandboxes!r:.80}; {how}")


def lease_for(sandboxes: SandboxPool, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
    """Lease a sandbox of that spec if the pool has several specs; otherwise lease the kind that the pool has."""
    return sandboxes.lease(spec) if isinstance(sandboxes, TaskSandboxPools) else sandboxes.lease()
