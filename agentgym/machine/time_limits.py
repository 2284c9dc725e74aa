"""Time limits that pause while the scheduler delays a rollout or the host does its own work.

They also pause while the process stands still, because the loop's clock does (`agentgym.machine.clock`).

The module also patches asyncio's task groups, so that a group undoes its own cancellation of its asyncio task.
Otherwise no limit would work after a failed group.
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
    """A limit like `asyncio.timeout(seconds)`, except that time spent `off_the_clock` doesn't count.

    Such time doesn't count in the limited asyncio task and in its child tasks. There are two ways to use a limit:

    - `await limit.bound(work)` limits a coroutine. If it is called again, only the time that is left remains.
    - `with limit:` makes the limit known to the code inside, and `async with limit.running():` inside that starts the
      clock.
    """

    __slots__ = ("_loop", "_pauses", "_running", "_timeout", "_token", "left")

    def __init__(self, seconds: float) -> None:
        self.left, self._pauses = seconds, 0
        """Seconds that were left when the limit's clock last paused."""
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
        """Run the clock while the block runs.

        Raises:
            TimeoutError: If the time runs out.
        """
        loop = asyncio.get_running_loop()
        keep_time(loop)
        try:
            async with self._start(loop):
                yield
        finally:
            self._end()

    async def bound(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine within this limit, and return its result. A coroutine that never waits sets no timer.

        Args:
            work: The coroutine to run.

        Raises:
            TimeoutError: If the work takes longer than the time that is left.
        """
        loop = asyncio.get_running_loop()
        keep_time(loop)
        began, self._loop = loop.time(), loop
        # Before the first step, because tasks started in it must know the limit.
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
        """Return the limit's timer, which the caller enters at once. The timer is paused if the limit is."""
        self._loop, self._running = loop, True
        _running.add(self)
        for held in _host_work.get(loop, ()):
            self._pauses += 1
            held.append(self)
        self._timeout = asyncio.timeout(None if self._pauses else self.left)
        return self._timeout

    def _end(self) -> None:
        """Stop the clock. If it is started again, it continues with the time that is left."""
        assert self._timeout is not None
        assert self._loop is not None
        if (when := self._timeout.when()) is not None:
            self.left = when - self._loop.time()
        self._running = False
        _running.discard(self)

    def expired(self) -> bool:
        """Return whether the time has run out."""
        return self._timeout is not None and self._timeout.expired()

    def of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether this limit runs in that event loop, or in none yet."""
        return self._loop in (None, loop)

    def pause(self) -> None:
        """Pause the clock. It runs again when each caller of `pause` has called `resume`."""
        self._pauses += 1
        if self._timeout is not None and self._is_open() and (when := self._timeout.when()) is not None:
            self.left = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def resume(self) -> None:
        """Undo one `pause`. After the last one is undone, the clock runs again with the time that was left."""
        self._pauses -= 1
        if self._timeout is not None and self._is_open() and not self._pauses:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self.left)

    def _is_open(self) -> bool:
        return self._running and not self.expired()


@coroutine
def _rest(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Run a coroutine to its end after it was run to its first wait.

    `waits_for` is the object that the coroutine awaits there.
    """
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
            # A task only ever sends None to its coroutine, as `yield from` does.
            rest: T = yield from work
            return rest


_running: set[TimeLimit] = set()
"""The limits of this process whose clocks were started and not stopped yet. A paused limit is one of them."""
_host_work: dict[asyncio.AbstractEventLoop, list[list[TimeLimit]]] = {}
"""For each loop, the limits that each open block of `all_clocks_stopped` pauses."""
_limits: ContextVar[tuple[TimeLimit, ...]] = ContextVar("limits", default=())


class HeldTime:
    """Counts the seconds spent `off_the_clock` (see `count_held_time`)."""

    seconds = 0.0


class Standstill:
    """Counts the seconds during which at least one `with standstill.block():` is open.

    The clock is that of the event loop in which the object was created.
    """

    __slots__ = ("_ended", "_loop", "_open", "_since")

    def __init__(self) -> None:
        # Stores the loop rather than its `time` method, which `keep_time` replaces.
        self._loop, self._ended, self._open, self._since = asyncio.get_running_loop(), 0.0, 0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, including those of an open block."""
        return self.until(self._loop.time())

    def until(self, moment: float) -> float:
        """Return the seconds counted up to a moment on the loop's clock.

        The moment must not be before the last time that a block began or ended.
        """
        return self._ended + (moment - self._since if self._open else 0.0)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Count the time until this `with` block ends."""
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
"""Counts the time for which the scheduler holds back an attempt: the one that the current asyncio task runs, or that
runs in the asyncio task that started the current one. None if that time isn't counted.
"""


@contextmanager
def counting_time_at_gate() -> Iterator[Standstill]:
    """Count how long the scheduler holds back an attempt, in this block and in the asyncio tasks started in it."""
    held = Standstill()
    token = at_the_gate.set(held)
    try:
        yield held
    finally:
        at_the_gate.reset(token)


_counted: ContextVar[HeldTime | None] = ContextVar("counted", default=None)


def count_held_time() -> HeldTime:
    """Start counting the time that this asyncio task, and those that it starts, spend `off_the_clock`.

    A later call starts a separate count.
    """
    held = HeldTime()
    _counted.set(held)
    return held


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Pause the time limits of this event loop that enclose this block, until the block ends.

    A thread inherits the context of its caller, and with it the limits of the caller's event loop. These keep
    running, because a thread must not touch another loop's timers.
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
    """Pause every time limit of the event loop for this block, including limits that start in it.

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
    """Leave the task group as Python 3.13 does: afterward, undo the group's own cancellation of its asyncio task.

    If a child fails while its group is awaited, earlier versions leave `Task.cancelling()` one too high.
    `asyncio.timeout` and the end of a rollout would mistake this for an outside cancellation of the asyncio task.
    """
    task, given_back = group._parent_task, group._parent_cancel_requested
    try:
        return await _leave_group(group, *error)
    finally:
        if group._parent_cancel_requested and not given_back:
            group._parent_cancel_requested = False  # Another fix for the same bug must not undo it twice.
            task.uncancel()


if sys.version_info < (3, 13):  # Decision 31 explains why the class itself is patched, for the whole process.
    asyncio.TaskGroup.__aexit__ = _leave_and_give_back  # type: ignore[method-assign, assignment]
