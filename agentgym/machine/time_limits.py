"""Time limits that are paused while the scheduler holds a rollout up, or the host does work of its own.

They stand still with the process, too: the loop's clock does (`agentgym.machine.clock`).

With them, task groups that give their own cancellation back: without it no limit after a failed group would hold.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import coroutine
from typing import Any, Self, TypeVar

from agentgym.machine.clock import keep_time

T = TypeVar("T")


class TimeLimit:
    """`asyncio.timeout(seconds)`, but for the time that its task and the tasks started in it spend `off_the_clock`.

    `await limit.bound(work)` limits a coroutine, and a next one to the time that has left. For a block, `with limit:`
    makes it known to the code inside, and `async with limit.running():` inside of that starts the clock.
    """

    __slots__ = ("_loop", "_pauses", "_running", "_timeout", "_token", "left")

    def __init__(self, seconds: float) -> None:
        self.left, self._pauses = seconds, 0
        """The seconds that were left when its clock last stood still."""
        self._timeout: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = False

    def __enter__(self) -> Self:
        self._token = _limits.set((*_limits.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _limits.reset(self._token)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the clock in this block; TimeoutError where the time runs out."""
        loop = asyncio.get_running_loop()
        keep_time(loop)
        try:
            async with self._start(loop):
                yield
        finally:
            self._end()

    async def bound(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result; TimeoutError where it takes longer. Work that waits for nothing sets no timer."""
        loop = asyncio.get_running_loop()
        keep_time(loop)
        began, self._loop = loop.time(), loop
        # Before the first step: tasks that are started in it must know the limit.
        token = _limits.set((*_limits.get(), self))
        try:
            try:
                waits_for = work.send(None)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self.left -= loop.time() - began
            try:
                async with self._start(loop):
                    return await _rest(work, waits_for)
            finally:
                self._end()
        finally:
            _limits.reset(token)

    def _start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Timeout:
        """The timer of its clock, which the caller enters at once; it stands still where somebody holds the limit."""
        self._loop, self._running = loop, True
        _running.add(self)
        for held in _host_work.get(loop, ()):
            self._pauses += 1
            held.append(self)
        self._timeout = asyncio.timeout(None if self._pauses else self.left)
        return self._timeout

    def _end(self) -> None:
        """Stop the clock for good, unless it is started again with the time that is left."""
        assert self._timeout is not None
        assert self._loop is not None
        if (when := self._timeout.when()) is not None:
            self.left = when - self._loop.time()
        self._running = False
        _running.discard(self)

    def expired(self) -> bool:
        """Whether the time has run out."""
        return self._timeout is not None and self._timeout.expired()

    def of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this limit runs in that event loop, or in none yet."""
        return self._loop in (None, loop)

    def pause(self) -> None:
        """Stop the clock; it runs again when each caller of `pause` has called `resume`."""
        self._pauses += 1
        if self._timeout is not None and self._is_open() and (when := self._timeout.when()) is not None:
            self.left = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def resume(self) -> None:
        """Let the clock run again, with the time that was left."""
        self._pauses -= 1
        if self._timeout is not None and self._is_open() and not self._pauses:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self.left)

    def _is_open(self) -> bool:
        return self._running and not self.expired()


@coroutine
def _rest(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Run a coroutine to its end that was run to its first wait; `waits_for` is what it waits for there."""
    while True:
        try:
            yield waits_for
        except BaseException as error:
            try:
                waits_for = work.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
        else:
            # What is sent to a task's coroutine is always None, with which this goes on.
            rest: T = yield from work
            return rest


_running: set[TimeLimit] = set()
"""The limits of this process whose block has been entered and not left."""
_host_work: dict[asyncio.AbstractEventLoop, list[list[TimeLimit]]] = {}
"""For each loop and each block of `all_clocks_stopped` that is open in it, the limits that the block holds."""
_limits: ContextVar[tuple[TimeLimit, ...]] = ContextVar("limits", default=())


class HeldTime:
    """Counts the seconds that were spent off the clock."""

    seconds = 0.0


class Standstill:
    """Counts the seconds in which one of its blocks is open, or several at once, by the clock of its loop."""

    __slots__ = ("_ended", "_loop", "_open", "_since")

    def __init__(self) -> None:
        # The loop, and not its `time`: that is another one when `keep_time` has been called.
        self._loop, self._ended, self._open, self._since = asyncio.get_running_loop(), 0.0, 0, 0.0

    @property
    def seconds(self) -> float:
        """The seconds so far, those of a block that is open included."""
        return self.until(self._loop.time())

    def until(self, moment: float) -> float:
        """Return the seconds up to a moment that is not before the last change."""
        return self._ended + (moment - self._since if self._open else 0.0)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Stand still for this block."""
        if not self._open:
            self._since = self._loop.time()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._ended += self._loop.time() - self._since


at_the_gate: ContextVar[Standstill | None] = ContextVar("at_the_gate", default=None)
"""What counts the time that the attempt of this task, or of the one that started it, is held by the scheduler."""


@contextmanager
def counting_time_at_gate() -> Iterator[Standstill]:
    """Count, in this block and the tasks that it starts, the time that the scheduler holds an attempt."""
    held = Standstill()
    token = at_the_gate.set(held)
    try:
        yield held
    finally:
        at_the_gate.reset(token)


_counted: ContextVar[HeldTime | None] = ContextVar("counted", default=None)


def count_held_time() -> HeldTime:
    """Count what this task and those it starts spend `off_the_clock` from now on, until the next call counts apart."""
    held = HeldTime()
    _counted.set(held)
    return held


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Pause the enclosing time limits of this event loop for this block.

    Those of another loop, whose context a thread has taken over, go on: they are no thread's to touch.
    """
    loop = asyncio.get_running_loop()
    held = [limit for limit in _limits.get() if limit.of(loop)]
    counted, began = _counted.get(), loop.time()
    for limit in held:
        limit.pause()
    try:
        yield
    finally:
        if counted is not None:
            counted.seconds += loop.time() - began
        for limit in held:
            limit.resume()


@contextmanager
def all_clocks_stopped() -> Iterator[None]:
    """Pause every time limit of the event loop for this block, those that begin in it too.

    It is for work of the host that rollouts must wait for, such as new weights for their engine.
    """
    loop = asyncio.get_running_loop()
    held = [limit for limit in _running if limit.of(loop)]
    blocks = _host_work.setdefault(loop, [])
    blocks.append(held)
    for limit in held:
        limit.pause()
    try:
        yield
    finally:
        blocks[:] = [block for block in blocks if block is not held]
        if not blocks:
            del _host_work[loop]
        for limit in held:
            limit.resume()


_leave_group: Any = asyncio.TaskGroup.__aexit__


async def _leave_and_give_back(group: Any, *error: Any) -> Any:
    """Leave the task group as Python 3.13 does: the group's own cancellation of its task does not count afterward.

    Where a child fails while its group is waited for, earlier versions leave `Task.cancelling()` raised by one.
    `asyncio.timeout` and the end of a rollout would take that for a cancellation of the task by somebody else.
    """
    task, given_back = group._parent_task, group._parent_cancel_requested
    try:
        return await _leave_group(group, *error)
    finally:
        if group._parent_cancel_requested and not given_back:
            group._parent_cancel_requested = False  # Whoever else mends this must not give it back once more.
            task.uncancel()


if sys.version_info < (3, 13):  # Decision 31 says why it is the class that is mended, for the whole process.
    asyncio.TaskGroup.__aexit__ = _leave_and_give_back  # type: ignore[method-assign, assignment]
