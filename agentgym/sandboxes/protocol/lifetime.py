"""The period during which a pool, a sandbox, a branch, a program or a shell can be used."""

import asyncio
import time
from types import TracebackType
from typing import Literal

from agentgym.errors import ClosedError


class Lifetime:
    """The period during which one object can be used; everything opened within it ends with it.

    Args:
        what: The object's name in error messages, such as "the pool".
        within: The enclosing lifetime, whose end also ends this one; None for none.

    Raises:
        ClosedError: If `within` is already over.
    """

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
        """Whether the lifetime has ended."""
        return self._ended is not None

    def check(self) -> None:
        """Raise ClosedError if the lifetime is over; the message says when and why it ended."""
        if self.is_over:
            raise self.error()

    def error(self) -> ClosedError:
        """Return the error for a use after the end."""
        at, why = self._ended or (time.monotonic(), "it ended")
        return ClosedError(f"{self.what} was closed {time.monotonic() - at:.1f} s ago, when {why}: use it before that")

    def call(self) -> "Call":
        """Return a context manager for a call that waits, for use in a `with` statement around the call.

        The statement raises ClosedError if the lifetime is already over, or if it ends during the call.
        """
        return Call(self)

    def end(self, why: str) -> None:
        """End the lifetime, and those of everything opened within it; ending it again has no effect.

        Args:
            why: The reason for the ClosedError of later uses, such as "its lease ended".
        """
        if self._ended is not None:
            return
        self._ended = (time.monotonic(), why)
        if self._within is not None:
            self._within._inner.discard(self)
        for call in [*self._calls]:
            call.interrupt()
        self.end_inner(why)

    def end_inner(self, why: str) -> None:
        """End the lifetimes of everything opened within this one, which itself continues.

        Args:
            why: The reason for the ClosedError of later uses.
        """
        for inner in [*self._inner]:
            inner.end(why)


class Call:
    """A waiting call, which is interrupted in its asyncio task when its lifetime ends."""

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
        """Make the call raise ClosedError at its next await."""
        self._interrupted = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._lifetime._calls.discard(self)
        # As in asyncio.timeout: if someone else cancelled the asyncio task, too, it stays cancelled.
        if self._interrupted and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._lifetime.error() from None
        return False
