"""A thread with an event loop, for callers that have no loop, or no asyncio task that lives long enough."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from agentgym.machine.clock import keep_time

T = TypeVar("T")

_Answer: TypeAlias = "concurrent.futures.Future[Any]"
_Call: TypeAlias = tuple[Callable[[], Coroutine[Any, Any, Any]], _Answer]


class LoopThread:
    """Runs coroutines one by one in one asyncio task, so later ones can close resources that earlier ones opened."""

    def __init__(self) -> None:
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="agentgym-bridge", daemon=True
        )
        self._thread.start()
        started.result()

    async def _serve(self, started: "concurrent.futures.Future[None]") -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task, self._calls = asyncio.get_running_loop(), task, asyncio.Queue[_Call | None]()
        keep_time(self._loop)
        started.set_result(None)
        while (call := await self._calls.get()) is not None:
            work, answer = call
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(await work())
            # Pass every exception, even a cancellation, to the caller, who would otherwise wait forever.
            except BaseException as failure:
                answer.set_exception(failure)
            while task.cancelling():
                task.uncancel()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine and return its result; if the wait is interrupted, the coroutine is cancelled."""
        answer: _Answer = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._calls.put_nowait, (work, answer))
            outcome: T = answer.result()
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel, answer)
            raise
        return outcome

    async def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the same as `run` for a caller in another event loop, which keeps running meanwhile."""
        answer: _Answer = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._calls.put_nowait, (work, answer))
        try:
            outcome: T = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(self._cancel, answer)
            raise
        return outcome

    def _cancel(self, answer: _Answer) -> None:
        if not (answer.cancel() or answer.done()):
            self._task.cancel()

    def close(self) -> None:
        """Wait for the submitted work, then end the thread."""
        self._loop.call_soon_threadsafe(self._calls.put_nowait, None)
        self._thread.join()
