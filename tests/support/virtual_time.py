"""Virtual time: an event loop whose clock jumps to the next timer, so that an hour of waiting takes no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the clock to it; without a timer it waits for real."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        events = super().select(0)
        if not events:
            self.now += timeout
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def advance(self, seconds: float) -> None:
        """Move the clock by what work takes that does not wait."""
        self._jump.now += seconds


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, where `loop.time()` starts at 0 and only timers move it; not for work in threads."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
