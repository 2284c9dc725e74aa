"""Processing of large requests in threads; small ones are cheaper to process in the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from agentgym.machine.finished import finished

T = TypeVar("T")

LARGE = 16 << 10
"""Bytes from which a request is large; a smaller one blocks the event loop for at most a few milliseconds."""
THREADS = 2
"""Threads that process all rollouts' requests; more threads wouldn't be faster, because they share one interpreter."""


class LargeRequests:
    """Processes one rollout's requests, one large request at a time so that other rollouts get the threads, too."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def work(self, size: int, done: Callable[[], T]) -> T:
        """Return the result of `done`, called directly for a small request and in a thread for a large one.

        A cancelled caller still waits until the thread is done with the request.

        Args:
            size: Size of the request in bytes.
            done: The work.
        """
        if size < LARGE:
            return done()
        async with self._one:
            return await finished(asyncio.get_running_loop().run_in_executor(_threads(), done))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="agentgym-requests")
