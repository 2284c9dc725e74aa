"""The time in which a pool, a sandbox, a branch, a program or a shell can be used."""

import asyncio
import time
from types import TracebackType
from typing import Literal

from agentgym.errors import ClosedError


class Lifetime:
    """The time in which one thing can be used; what was opened within it ends with it."""

    def __init__(self, what: str, within: "Lifetime | None" = None) -> None:
        self.what = what
        self._within = within
        self._inner: set[Lifetime] = set()
        self._calls: set[Call] = set()
        self._ended: tuple[float, str] | None = None
        if within is not None:
            within.check()
            within._inner.add(self)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended is not None

    def check(self) -> None:
        """Raise ClosedError, which says since when and why, where the time is over."""
        if self.is_over:
            raise self.error()

    def error(self) -> ClosedError:
        """Return the error for a use after the end."""
        at, why = self._ended or (time.monotonic(), "it ended")
        return ClosedError(f"{self.what} was closed {time.monotonic() - at:.1f} s ago, when {why}: use it before that")

    def call(self) -> "Call":
        """Return a block for a call that waits: ClosedError where the time is over, or ends while the block runs."""
        return Call(self)

    def end(self, why: str) -> None:
        """End the time now, and that of all that was opened within it; ending it again changes nothing."""
        if self._ended is not None:
            return
        self._ended = (time.monotonic(), why)
        if self._within is not None:
            self._within._inner.discard(self)
        for call in [*self._calls]:
            call.interrupt()
        self.end_inner(why)

    def end_inner(self, why: str) -> None:
        """End the time of all that was opened within this one, which goes on."""
        for inner in [*self._inner]:
            inner.end(why)


class Call:
    """One call that waits, in the task that makes it; the end of a lifetime interrupts it."""

    __slots__ = ("_cancelling", "_interrupted", "_lifetime", "_task")

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._interrupted = False

    def __enter__(self) -> None:
        self._lifetime.check()
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._lifetime._calls.add(self)

    def interrupt(self) -> None:
        """Have the call raise ClosedError at its next wait."""
        self._interrupted = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._lifetime._calls.discard(self)
        # As in asyncio.timeout: what somebody else cancelled stays cancelled.
        if self._interrupted and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._lifetime.error() from None
        return False
