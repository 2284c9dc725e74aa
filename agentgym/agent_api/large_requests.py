"""Work on large requests, which is done in threads: a small one is cheaper to work on in the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from agentgym.machine.finished import finished

T = TypeVar("T")

LARGE = 16 << 10
"""Bytes from which on a request is large: up to there, all work on it takes the event loop a few milliseconds."""
THREADS = 2
"""Threads that work on the requests of all rollouts: they share one interpreter, so more would be no faster."""


class LargeRequests:
    """Does the work on the requests of one rollout, one large request at a time: others need the threads, too."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def work(self, size: int, done: Callable[[], T]) -> T:
        """Return what `done` returns: called at once for a small request, in a thread for a large one.

        If the caller is cancelled, it ends when the thread is done with the request.
        """
        if size < LARGE:
            return done()
        async with self._one:
            return await finished(asyncio.get_running_loop().run_in_executor(_threads(), done))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="agentgym-requests")
