"""Processes large requests in threads. Small requests are cheaper to process in the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from agentgym.machine.finished import finished

T = TypeVar("T")

LARGE = 16 << 10
"""Number of bytes from which a request counts as large. A smaller one blocks the event loop for a few milliseconds at
most.
"""
THREADS = 2
"""Number of threads that process the large requests of all rollouts. More threads wouldn't be faster: they share one
interpreter.
"""


class LargeRequests:
    """Processes the requests of one rollout.

    Only one large request is processed at a time, so that other rollouts also get a thread.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def work(self, size: int, done: Callable[[], T]) -> T:
        """Return the result of `done`, which is called in a thread if the request is large, otherwise directly.

        If the caller is cancelled, it still waits until the thread is done with the request.

        Args:
            size: Size of the request in bytes.
            done: The function that does the work.
        """
        if size < LARGE:
            return done()
        async with self._one:
            return await finished(asyncio.get_running_loop().run_in_executor(_threads(), done))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="agentgym-requests")
