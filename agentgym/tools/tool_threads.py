"""Threads for plain tools and rewards, which never block the event loop and are interrupted if nobody waits.

A thread can't be killed, but an exception can be raised in it. Python code meets the exception at its next step; code
inside a C call (a sleep, a large matrix product) meets it when that call returns. If a thread keeps running, the log
names it every five seconds until it ends.
"""

import asyncio
import ctypes
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import ref

from agentgym.errors import MachineError
from agentgym.errors.tracebacks import log_once, place_of_frame

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Seconds that an interrupted thread may keep running before the log names it, and before its env is closed anyway."""


class Interrupted(BaseException):
    """Raised in a thread whose caller has stopped waiting; `except Exception` doesn't catch it."""


class Interruptible(Protocol):
    """An object that can interrupt a C call in which one of its threads hangs."""

    def interrupt(self) -> None:
        """Interrupt the C call in which a thread of this object hangs, and return immediately."""
        ...


class Threads:
    """The threads that work for one rollout."""

    __slots__ = ("_owner", "_workers")

    def __init__(self, owner: Interruptible | None = None) -> None:
        # A weak reference, so that a finished env is freed at once, not when the collector finds the cycle.
        self._owner = None if owner is None else ref(owner)
        self._workers: set[_Worker] = set()

    @property
    def owner(self) -> Interruptible | None:
        """The object that the threads work for; its `interrupt` is called when one of them is interrupted."""
        return None if self._owner is None else self._owner()

    def __len__(self) -> int:
        """Return the number of threads that are still working."""
        self._workers = {worker for worker in self._workers if worker.thread.is_alive()}
        return len(self._workers)

    async def ended(self, owner: str) -> None:
        """Wait for at most `GRACE_S` seconds until no thread is working. Log each one that still runs, and its line.

        A cancellation is raised only when the wait is over, because resources that these threads use must not be
        closed earlier.

        Args:
            owner: The name in the log of what is closed after the wait, such as the env's class.
        """
        cancelled, until = False, asyncio.get_running_loop().time() + GRACE_S
        while len(self) and (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.wait([worker.future for worker in self._workers], timeout=left)
                for worker in self._workers:
                    if worker.future.done():
                        worker.thread.join(0.002)  # The thread has finished its work and is about to end.
            except asyncio.CancelledError:
                cancelled = True
        for worker in self._workers:
            if worker.thread.is_alive():
                log.warning("%s was closed while %s", owner, worker.described())
        if cancelled:
            raise asyncio.CancelledError


async def in_own_thread(work: Callable[[], T], *, name: str = "agentgym-tool", threads: Threads | None = None) -> T:
    """Run the work in a thread, and return its result or raise its error; by then the thread has ended.

    The thread has a copy of the caller's context variables, as in `asyncio.to_thread`. It is interrupted if the caller
    stops waiting. Each call gets a new daemon thread: work that never returns takes no slot from other work and doesn't
    delay the program's exit.

    Args:
        work: The function to run.
        name: The thread's name.
        threads: The threads of one rollout, to which this one is added while it runs; None keeps no record.

    Raises:
        MachineError: If the machine can't start another thread.
    """
    worker = _Worker(work, asyncio.get_running_loop(), name, None if threads is None else threads.owner)
    try:
        worker.start()
    except RuntimeError as error:
        raise MachineError(f"no thread can be started on this machine for {name}: {error}") from error
    if threads is not None:
        threads._workers.add(worker)
    try:
        if not worker.future.done():
            await asyncio.wait((worker.future,))
        while worker.thread.is_alive():
            # The thread is about to end, so joining it is quicker than another iteration of the event loop.
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
    """Call a user's method: an async one in the event loop, any other in a separate thread.

    If a plain method returns an awaitable, as a decorated async method does, it is awaited.
    """
    code = getattr(function, "__code__", None)
    # The flag is checked first, because inspect checks much more and takes ten times as long.
    if (code is not None and code.co_flags & inspect.CO_COROUTINE) or inspect.iscoroutinefunction(function):
        return await function(**arguments)
    returned = await in_own_thread(lambda: function(**arguments), name=name, threads=threads)
    return await returned if inspect.isawaitable(returned) else returned


class _Worker:
    def __init__(
        self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, name: str, owner: Interruptible | None = None
    ) -> None:
        self.work, self.loop, self.owner = partial(_in_context, copy_context(), work), loop, owner
        self.future: asyncio.Future[Any] = loop.create_future()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._working = self._unwanted = self._starting = False
        self._kept: tuple[Callable[[Any], None], object] | None = None
        """The result of work that finished before its thread's start() returned."""

    def start(self) -> None:
        """Start the thread from the event loop's thread; if the work is short, the future is already done afterwards.

        Thread.start() returns once the new thread runs. Threads take turns every few milliseconds, so short work is
        finished by then, and the event loop needn't be woken for it.
        """
        self._starting = True
        self.thread.start()
        with self._lock:
            self._starting = False
        if self._kept is not None:
            set_it, value = self._kept
            set_it(value)

    def described(self) -> str:
        """Return the thread's name and the line that it is at, for the log."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return f"its thread {self.thread.name!r} was still running, at {place_of_frame(frame) if frame else 'its end'}"

    def interrupt(self) -> None:
        """Raise Interrupted in the thread if it is working, and check after five seconds whether it has ended.

        Work that hasn't started is never started.
        """
        with self._lock:  # Locked until Interrupted is raised, so that the thread can't move on to something else.
            self._unwanted = True
            if not self._working or self.thread.ident is None:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(Interrupted))
        if self.owner is not None:
            try:
                self.owner.interrupt()
            except Exception as error:
                log_once(f"{type(self.owner).__name__}.interrupt", error, self.owner.interrupt)
        self._watch()

    def _watch(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_later(GRACE_S, self._complain)

    def _complain(self) -> None:
        if self.thread.is_alive():
            log.warning(
                "a tool or reward keeps running after it was interrupted, in a call that does not return: %s",
                self.described(),
            )
            self.interrupt()  # The work may have caught the first exception.

    def _run(self) -> None:
        try:
            self._tell(*self._outcome())
        except Interrupted:  # Interrupted after the work was done; nobody needs the result.
            self._tell(self.future.set_result, None)

    def _outcome(self) -> tuple[Callable[[Any], None], object]:
        try:
            try:
                self._begin()
                outcome: tuple[Callable[[Any], None], object] = (self.future.set_result, self.work())
            finally:
                with self._lock:
                    self._working = False
        except (StopIteration, asyncio.CancelledError) as error:  # Neither may be raised from an awaited future.
            return self.future.set_exception, RuntimeError(f"{type(error).__name__}: {error}")
        except BaseException as error:
            return self.future.set_exception, error
        return outcome

    def _begin(self) -> None:
        with self._lock:
            if self._unwanted:
                raise Interrupted
            self._working = True

    def _tell(self, set_it: Callable[[Any], None], value: object) -> None:
        with self._lock:
            if self._starting:
                self._kept = set_it, value
                return

        def settle() -> None:
            if not self.future.done():
                set_it(value)

        with suppress(RuntimeError):  # The loop is closed, and nobody waits.
            self.loop.call_soon_threadsafe(settle)


def _in_context(context: Context, work: Callable[[], T]) -> T:
    return context.run(work)


def _read(future: "asyncio.Future[Any]") -> None:
    """Retrieve the future's exception, so that asyncio doesn't log it: nobody waits for it."""
    if not future.cancelled():
        future.exception()


async def threads_ended(env: Interruptible) -> None:
    """Wait until the threads of the env's plain tools and rewards have ended, for at most five seconds.

    If a thread keeps running, the log names it.
    """
    threads: Threads | None = getattr(env, "_threads", None)
    if threads is not None and len(threads):
        await threads.ended(type(env).__name__)
