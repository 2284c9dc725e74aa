"""Threads for blocking tools and rewards: they never block the event loop, and are interrupted when nobody waits.

A thread cannot be killed, but an exception can be raised in it. Python code meets the exception at its next step; code
inside one call of C (a sleep, a large matrix product) meets it when that call returns. The log names a thread that goes
on, every five seconds, until it ends.
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
"""Seconds that an interrupted thread may go on before the log names it, and before its env is closed anyway."""


class Interrupted(BaseException):
    """Raised in a thread whose caller has stopped waiting; `except Exception` does not catch it."""


class Interruptible(Protocol):
    """Something that can end a call of C in which one of its threads hangs."""

    def interrupt(self) -> None:
        """End such a call, and return at once."""
        ...


class Threads:
    """The threads that work for one rollout."""

    __slots__ = ("_owner", "_workers")

    def __init__(self, owner: Interruptible | None = None) -> None:
        # Weakly: an env that is done with goes at once, not when the collector finds the circle.
        self._owner = None if owner is None else ref(owner)
        self._workers: set[_Worker] = set()

    @property
    def owner(self) -> Interruptible | None:
        """Whose work they do: it is told when one of them is interrupted."""
        return None if self._owner is None else self._owner()

    def __len__(self) -> int:
        """Count the threads that are still at work."""
        self._workers = {worker for worker in self._workers if worker.thread.is_alive()}
        return len(self._workers)

    async def ended(self, owner: str) -> None:
        """Wait until no thread is at work, for `GRACE_S` seconds at most; the log then says what each one hangs in.

        A cancellation is raised only when the wait is over: what these threads use must not be closed before.
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
    """Run the work in a thread, and return or raise what it does; the thread has ended by then.

    It has a copy of the caller's context variables, as in `asyncio.to_thread`.
    The thread is interrupted where the caller stops waiting. Each call has a daemon thread: work that never returns
    takes no place from the others and does not hold up the end of the program. `threads` keeps account of the threads
    of one rollout.

    :raises MachineError: where the machine can start no thread.
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
            # The thread is a few instructions from its end: joining it is quicker than another turn of the loop.
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
    """Call a method of the user: an async one in the event loop, any other in a thread of its own.

    An awaitable that a plain method returns (a decorated async method does so) is awaited.
    """
    code = getattr(function, "__code__", None)
    # The flag is looked at first: inspect looks at much more, and takes ten times as long.
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
        """The outcome of work that was done before the start of its thread returned."""

    def start(self) -> None:
        """Start the thread, from that of the loop; where its work is short, the future is done by then.

        A start returns when the thread has begun. Threads take turns every few milliseconds, so short work is done by
        then, and the loop need not be woken for it.
        """
        self._starting = True
        self.thread.start()
        with self._lock:
            self._starting = False
        if self._kept is not None:
            set_it, value = self._kept
            set_it(value)

    def described(self) -> str:
        """Say the thread's name and the line that it is at, for the log."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return f"its thread {self.thread.name!r} still runs, at {place_of_frame(frame) if frame else 'its end'}"

    def interrupt(self) -> None:
        """Raise Interrupted in the thread where it is at work, and look after five seconds whether it has ended.

        Work that has not begun is not begun.
        """
        with self._lock:  # Held until it is raised: the thread cannot meanwhile go on to something else.
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
            log.warning("a tool goes on after its limit, in a call that does not return: %s", self.described())
            self.interrupt()  # The work may have caught the first exception.

    def _run(self) -> None:
        try:
            self._tell(*self._outcome())
        except Interrupted:  # It came after the work was done. Nobody waits for the result, only for the end.
            self._tell(self.future.set_result, None)

    def _outcome(self) -> tuple[Callable[[Any], None], object]:
        try:
            try:
                self._begin()
                outcome: tuple[Callable[[Any], None], object] = (self.future.set_result, self.work())
            finally:
                with self._lock:
                    self._working = False
        except (StopIteration, asyncio.CancelledError) as error:  # Neither may be raised where a future is awaited.
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
    """Read what the future raised, so that asyncio does not report it: nobody waits for it."""
    if not future.cancelled():
        future.exception()


async def threads_ended(env: Interruptible) -> None:
    """Wait until the threads of the env's plain tools and rewards have ended, for five seconds at most.

    The log names each thread that goes on.
    """
    threads: Threads | None = getattr(env, "_threads", None)
    if threads is not None and len(threads):
        await threads.ended(type(env).__name__)
