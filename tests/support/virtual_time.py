"""Virtual time: an event loop whose clock jumps to the next timer, so that an hour of waiting takes no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Moves the clock to the next timer instead of waiting for it; without a timer, it really waits."""

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
        """Advance the clock by the duration of work that doesn't wait."""
        self._jump.now += seconds


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run like `asyncio.run`, but `loop.time()` starts at 0 and only timers move it; not for work in threads."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
