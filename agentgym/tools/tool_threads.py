"""Blocking work in a thread of its own: it never blocks the event loop, and it ends when nobody waits for it any more.

A thread cannot be killed. An exception can be raised in it, which ends Python code that loops or computes at its next
step; code that is inside one call of C (a sleep, a large matrix product) meets it when that call returns. A thread that
goes on all the same is named in the log, again and again, until it ends.
"""

import asyncio
import ctypes
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from agentgym.failures import place_of_frame

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long after it was interrupted a thread may go on before the log says so, and before its env is closed anyway."""


class Interrupted(BaseException):
    """Raised in a thread whose caller has stopped waiting; no tool's `except Exception` keeps it in."""


class Threads:
    """The threads that work for one rollout; `ended` returns when the last of them has, or after a grace."""

    __slots__ = ("_workers",)

    def __init__(self) -> None:
        self._workers: set[_Worker] = set()

    def __len__(self) -> int:
        """How many are still at work."""
        self._workers = {worker for worker in self._workers if worker.thread.is_alive()}
        return len(self._workers)

    async def ended(self, owner: str) -> None:
        """Wait until no thread is at work; after `GRACE_S` seconds the log says what each one hangs in.

        A cancellation on the way is passed on when the wait is over: whoever closes what these threads use may only
        do so behind them.
        """
        cancelled, until = False, asyncio.get_running_loop().time() + GRACE_S
        while len(self) and (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.wait([worker.future for worker in self._workers], timeout=left)
                for worker in self._workers:
                    if worker.future.done():
                        worker.thread.join(0.002)  # It has nothing left to do but to end.
            except asyncio.CancelledError:
                cancelled = True
        for worker in self._workers:
            if worker.thread.is_alive():
                log.warning("%s is closed while %s", owner, worker.described())
        if cancelled:
            raise asyncio.CancelledError


async def in_own_thread(work: Callable[[], T], *, name: str = "agentgym-tool", threads: Threads | None = None) -> T:
    """What the work returns or raises; its thread has ended by then. Where the caller stops waiting, it is interrupted.

    A daemon thread for each call: one that never returns takes no place from the others and does not hold up the end
    of the program. `threads` is where its rollout keeps account of it.
    """
    worker = _Worker(work, asyncio.get_running_loop(), name)
    if threads is not None:
        threads._workers.add(worker)
    worker.thread.start()
    try:
        await asyncio.wait((worker.future,))
        while worker.thread.is_alive():
            # It lacks a few instructions to its end: to wait for them is quicker than to come again for them.
            worker.thread.join(0.002)
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        worker.future.add_done_callback(_read)
        worker.interrupt()
        raise
    if threads is not None:
        threads._workers.discard(worker)
    result: T = worker.future.result()
    return result


async def call_method(
    function: Callable[..., Any], arguments: dict[str, Any], *, name: str, threads: Threads | None = None
) -> Any:
    """What a method of the user returns: an async one runs in the event loop, any other in a thread of its own.

    A plain one that returns an awaitable, as one behind a decorator does, is awaited.
    """
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    returned = await in_own_thread(lambda: function(**arguments), name=name, threads=threads)
    return await returned if inspect.isawaitable(returned) else returned


class _Worker:
    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.work, self.loop = work, loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._working = True

    def described(self) -> str:
        """The thread's name and the line that it is at, for the log."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return f"its thread {self.thread.name!r} still runs, at {place_of_frame(frame) if frame else 'its end'}"

    def interrupt(self) -> None:
        """Raise Interrupted in the thread while it is at work, and watch that it ends."""
        with self._lock:  # Held until it is raised: the thread cannot meanwhile go on to something else.
            if not self._working or self.thread.ident is None:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(Interrupted))
        self._watch()

    def _watch(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_later(GRACE_S, self._complain)

    def _complain(self) -> None:
        if self.thread.is_alive():
            log.warning("a tool goes on after its limit, in a call that does not return: %s", self.described())
            self.interrupt()  # It may have caught the first one.

    def _run(self) -> None:
        try:
            self._tell(*self._outcome())
        except Interrupted:  # It came after the work was done: nobody waits for the result, but for the end.
            self._tell(self.future.set_result, None)

    def _outcome(self) -> tuple[Callable[[Any], None], object]:
        try:
            try:
                outcome: tuple[Callable[[Any], None], object] = (self.future.set_result, self.work())
            finally:
                with self._lock:
                    self._working = False
        except (StopIteration, asyncio.CancelledError) as error:  # Neither may be raised where a future is awaited.
            return self.future.set_exception, RuntimeError(f"{type(error).__name__}: {error}")
        except BaseException as error:
            return self.future.set_exception, error
        return outcome

    def _tell(self, set_it: Callable[[Any], None], value: object) -> None:
        def settle() -> None:
            if not self.future.done():
                set_it(value)

        with suppress(RuntimeError):  # The loop is closed: nobody waits.
            self.loop.call_soon_threadsafe(settle)


def _read(future: "asyncio.Future[Any]") -> None:
    """Nobody waits for it: what it raised is no news."""
    if not future.cancelled():
        future.exception()
