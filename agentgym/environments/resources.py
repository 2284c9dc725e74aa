"""Resources that an env opens once for all its rollouts, such as a client, an index or a semaphore."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from agentgym.environments.env import Env
from agentgym.environments.mixture import Mixture
from agentgym.errors import EnvError, boundary

_open: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[type[Env[Any]], _Resources]]" = WeakKeyDictionary()
"""The open resources of each event loop, by env class."""


class _Resources:
    """The open resources of one env class.

    One asyncio task both opens and closes them, because resources that contain a task group require that.
    """

    def __init__(self, env: type[Env[Any]]) -> None:
        self.env = env
        self.users = 0
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._close = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"the resources of {env.__name__}")

    async def _run(self) -> None:
        try:
            with boundary(EnvError, f"{self.env.__name__}.open_resources"):
                async with self.env.open_resources() as resources:
                    self.ready.set_result(resources)
                    await self._close.wait()
        except asyncio.CancelledError:
            self.ready.cancel()
            raise
        except BaseException as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)
            self.ready.exception()  # Waiting callers get the error. If there are none, asyncio must not log it.

    def held(self) -> Any:
        """Return the open resources, or raise EnvError if they have ended by themselves."""
        if self._task.done():
            why = None if self._task.cancelled() else self._task.exception()
            raise EnvError(
                f"{self.env.__name__}.open_resources: the resources ended while rollouts were using them"
            ) from why
        return self.ready.result()

    async def close(self) -> None:
        """Close the resources, and raise any error from closing; cancelling this call also cancels the closing."""
        self._close.set()
        if not self.ready.done():
            self._task.cancel()
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error


@asynccontextmanager
async def open_resources(env: type[Env[Any]]) -> AsyncIterator[Any]:
    """Open an env's resources for all its rollouts in this event loop, and yield them.

    Runs, evaluations, `run_groups` and single rollouts do this by themselves. They share resources that are already
    open: resources are opened once, and closed when the last block that uses them ends, even by an error or a
    cancellation.

    Args:
        env: The env class. A mixture opens the resources of its members.

    Yields:
        The value of `env.open_resources`, a dict of them by member for a mixture, or None if the env opens nothing.

    Raises:
        EnvError: If they can't be opened or closed.
    """
    async with AsyncExitStack() as stack:
        if issubclass(env, Mixture):
            yield {name: await stack.enter_async_context(_shared(of.env)) for name, of in env.members.items()}
        else:
            yield await stack.enter_async_context(_shared(env))


def opens_resources(env: type[Env[Any]]) -> bool:
    """Return whether the env itself opens resources; a mixture doesn't, because its members do."""
    return getattr(env.open_resources, "__func__", None) is not getattr(Env.open_resources, "__func__", None)


def share_resources(env: Env[Any]) -> None:
    """Set the env's `resources` to the open ones of its class; raise EnvError if they have ended by themselves."""
    found = _open.get(asyncio.get_running_loop(), {}).get(type(env))
    if found is not None:
        env.resources = found.held()


@asynccontextmanager
async def _shared(env: type[Env[Any]]) -> AsyncIterator[Any]:
    if not opens_resources(env):
        yield None
        return
    opened = _open.setdefault(asyncio.get_running_loop(), {})
    found = opened.get(env)
    if found is None:
        found = opened[env] = _Resources(env)
    found.users += 1
    try:
        # Shielded, because one of several waiters may be cancelled.
        yield await asyncio.shield(found.ready)
    finally:
        found.users -= 1
        if not found.users:
            del opened[env]
            await found.close()
