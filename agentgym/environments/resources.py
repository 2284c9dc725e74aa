"""What an env opens once for all its rollouts, such as a client, an index or a semaphore."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from agentgym.environments.env import Env
from agentgym.environments.mixture import Mixture
from agentgym.errors import EnvError, boundary

_open: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[type[Env[Any]], _Resources]]" = WeakKeyDictionary()
"""The open resources of each event loop, by the class that they are of."""


class _Resources:
    """The resources of one env class; a task of its own opens and closes them, as task groups in them need it."""

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
            self.ready.exception()  # Whoever waits gets it; where nobody does, it is nobody's.

    def held(self) -> Any:
        """The open resources; EnvError where they have ended by themselves."""
        if self._task.done():
            why = None if self._task.cancelled() else self._task.exception()
            raise EnvError(f"{self.env.__name__}.open_resources: they have ended while rollouts use them") from why
        return self.ready.result()

    async def close(self) -> None:
        """Close them, and raise what their closing raised; a cancellation meanwhile cuts the closing short."""
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
    """Yield what `env.open_resources` opens, for all rollouts of the env that this event loop plays meanwhile.

    A run, an evaluation, `run_groups` and a rollout do this by themselves, and share what is open already: what is
    opened here is opened once, and closed where the last block that uses it ends, also by an error or a cancellation.
    A mixture opens those of its members, and yields them by the members' names. None for an env that opens nothing.

    :raises EnvError: where they cannot be opened or closed.
    """
    async with AsyncExitStack() as stack:
        if issubclass(env, Mixture):
            yield {name: await stack.enter_async_context(_shared(of.env)) for name, of in env.members.items()}
        else:
            yield await stack.enter_async_context(_shared(env))


def opens_resources(env: type[Env[Any]]) -> bool:
    """Whether the env itself opens anything; a mixture leaves that to its members."""
    return getattr(env.open_resources, "__func__", None) is not getattr(Env.open_resources, "__func__", None)


def share_resources(env: Env[Any]) -> None:
    """Give an instance the open resources of its class; EnvError where they have ended by themselves."""
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
        # Shielded: one of several that wait may be cancelled.
        yield await asyncio.shield(found.ready)
    finally:
        found.users -= 1
        if not found.users:
            del opened[env]
            await found.close()
