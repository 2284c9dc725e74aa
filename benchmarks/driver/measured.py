"""CPU time per turn of several ways to run the same dialogs, which take turns."""

import gc
import time
from collections.abc import Awaitable, Callable


class Measured:
    """The least CPU microseconds per turn of each way to run the dialogs.

    It is the least over rounds in which all ways take turns.
    """

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.turns_per_s = 0.0

    async def play(self, name: str, way: Callable[[], Awaitable[int]]) -> None:
        """Run one way once, in this process, and record its time."""
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        turns = await way()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.note(name, cpu / turns * 1e6)
        if name == "ours":
            self.turns_per_s = max(self.turns_per_s, turns / wall)

    def note(self, name: str, us: float) -> None:
        """Record one measured time; only the least time of each name is stored."""
        self.us[name] = min(self.us.get(name, us), us)
