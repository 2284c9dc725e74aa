"""Detection of stopped processes that ran meanwhile: a kernel timer or a watched file can wake one."""

from __future__ import annotations

import os
import signal
import time

from .limits import FORK_S
from .process_tree import content, descendants, names, send_signal
from .space import Space

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import TypeAlias

    Traces: TypeAlias = dict[str, tuple[bytes, bytes]]

WOKEN = "a process of the sandbox was woken meanwhile, for example by a timer, and was killed"
RUNS = (b"R", b"S")
"""States of a thread that has not stopped yet; one that waits in the kernel, or has ended, runs no code."""


class Stillness:
    """A record of every process of the sandbox at the time it stopped.

    Each time a thread runs, the kernel counts that it gave up the processor afterward. If the code has no namespace,
    nothing is checked: gVisor's kernel keeps no such count.
    """

    def __init__(self) -> None:
        """Wait until every process has stopped; processes that do not stop soon are killed."""
        self.seen: dict[int, Traces] = {}
        if Space.current is None:
            return
        deadline = time.monotonic() + FORK_S
        while moving := self.look():
            if time.monotonic() > deadline:
                kill(moving)
            time.sleep(0.0001)

    def look(self) -> set[int]:
        """Record the current state of all processes, and return those that run."""
        self.seen = {pid: traces(pid) for pid in descendants(os.getpid())}
        return {pid for pid, threads in self.seen.items() if any(state in RUNS for state, _ in threads.values())}

    def broken(self, *, by_others_than: int) -> bool:
        """Kill the processes that ran since the last `look`, except `by_others_than`; return whether there were any."""
        if Space.current is None:
            return False
        now = {*descendants(os.getpid())}
        moved = {pid for pid in now - {by_others_than} if traces(pid) != self.seen.get(pid, {})}
        kill(moved)
        return bool(moved)


def traces(pid: int) -> Traces:
    """Return the state of each thread of a process, and how often it gave up the processor."""
    found = {}
    try:
        for thread in names(f"{pid}/task"):
            lines = content(f"{pid}/task/{thread}/status").split(b"\n")
            found[thread] = (
                next(line for line in lines if line.startswith(b"State:")).split()[1],
                b"".join(line for line in lines if line.startswith((b"voluntary_ctxt", b"nonvoluntary_ctxt"))),
            )
    except (FileNotFoundError, ProcessLookupError):
        pass  # It has ended.
    return found


def kill(pids: set[int]) -> None:
    """Kill the processes, so that none runs code again; one whose parent lives remains as a zombie."""
    for pid, parent in descendants(os.getpid()).items():
        if pid in pids:
            send_signal(pid, parent, signal.SIGKILL)
