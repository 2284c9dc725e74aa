"""CPU time a turn of several ways to play the same dialogs, which take turns."""

import gc
import time
from collections.abc import Awaitable, Callable


class Measured:
    """The least CPU microseconds a turn of each way to play, over rounds in which all of them take turns."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.turns_per_s = 0.0

    async def play(self, name: str, way: Callable[[], Awaitable[int]]) -> None:
        """Play one way once, in this process."""
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        turns = await way()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.note(name, cpu / turns * 1e6)
        if name == "ours":
            self.turns_per_s = max(self.turns_per_s, turns / wall)

    def note(self, name: str, us: float) -> None:
        """Take one figure in."""
        self.us[name] = min(self.us.get(name, us), us)
