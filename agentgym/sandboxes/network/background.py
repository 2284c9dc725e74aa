"""A thread with an event loop for all sandboxes' network traffic, so that the program's own loop is never blocked."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentgym.machine.clock import keep_time
from agentgym.machine.finished import finished

RESOLVERS = 32
T = TypeVar("T")


class Background:
    """The thread of this process for the network traffic of sandboxes.

    It runs from the first `hold` to the last `release`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        """Start the thread if it is not running; pair each `hold` with one `release`."""
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(RESOLVERS, thread_name_prefix="agentgym-resolver"))
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="agentgym-network", daemon=True)
                self._thread.start()

    def release(self) -> None:
        """Undo one `hold`, and stop the thread if it was the last one."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the thread's loop; if the caller is cancelled, so is the coroutine."""
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the thread's loop until it ends, even if the caller is cancelled."""
        assert self._loop is not None
        return await finished(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop)))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    keep_time(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


BACKGROUND = Background()
