"""Time limits that stand still while a rollout is held up by the scheduler."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_limits: ContextVar[tuple[asyncio.Timeout, ...]] = ContextVar("limits", default=())


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout(seconds)`, but for the time that its task and its children spend `off_the_clock`."""
    async with asyncio.timeout(seconds) as limit:
        token = _limits.set((*_limits.get(), limit))
        try:
            yield limit
        finally:
            _limits.reset(token)


@contextmanager
def off_the_clock() -> Iterator[None]:
    """No time limit around this block runs on, or runs out, inside it."""
    loop = asyncio.get_running_loop()
    held = [(limit, when - loop.time()) for limit in _limits.get() if (when := limit.when()) and not limit.expired()]
    for limit, _ in held:
        limit.reschedule(None)
    try:
        yield
    finally:
        for limit, left in held:
            limit.reschedule(loop.time() + left)
