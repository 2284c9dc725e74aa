"""Blocking work in a thread of its own: it never blocks the event loop, and it ends when nobody waits for it any more.

A thread cannot be killed. An exception can be raised in it, which ends Python code that loops or computes at its next
step; code that is inside one call of C (a sleep, a large matrix product) meets it when that call returns. A thread that
goes on all the same is named in the log, again and again, until it ends.
"""

import asyncio
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long after it was interrupted a thread may go on before the log says so."""


class Interrupted(BaseException):
    """Raised in a thread whose caller has stopped waiting; no tool's `except Exception` keeps it in."""


async def in_own_thread(work: Callable[[], T], *, name: str = "agentgym-tool") -> T:
    """What the work returns or raises; where the caller stops waiting, the work is interrupted.

    A daemon thread for each call: one that never returns takes no place from the others and does not hold up the end
    of the program.
    """
    worker = _Worker(work, asyncio.get_running_loop(), name)
    worker.thread.start()
    try:
        result: T = await worker.future
        return result
    except asyncio.CancelledError:
        worker.interrupt()
        raise


class _Worker:
    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.work, self.loop = work, loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._working = True

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
            log.warning("a tool's thread goes on after its limit: it is inside a call that does not return")
            self._watch()

    def _run(self) -> None:
        try:
            self._tell(*self._outcome())
        except Interrupted:  # It came after the work was done: nobody waits.
            return

    def _outcome(self) -> tuple[Callable[[Any], None], object]:
        try:
            try:
                outcome: tuple[Callable[[Any], None], object] = (self.future.set_result, self.work())
            finally:
                with self._lock:
                    self._working = False
        except StopIteration as error:  # A future refuses to hold it.
            return self.future.set_exception, RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            return self.future.set_exception, error
        return outcome

    def _tell(self, set_it: Callable[[Any], None], value: object) -> None:
        def settle() -> None:
            if not self.future.done():
                set_it(value)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)
