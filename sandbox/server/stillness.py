"""Whether what was stopped stands still: a timer of the kernel, or a watched file, can wake a stopped process."""

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
"""States of a thread that has not stopped yet; one that waits within the kernel, or has ended, runs no code."""


class Stillness:
    """What every process of the sandbox was like when it had stopped.

    Each time a thread runs, the kernel counts that it gave up the processor afterward. Where the kernel has no
    namespace for the code, nothing is looked at: gVisor's counts nothing of the kind.
    """

    def __init__(self) -> None:
        """Wait until everything stands still; what does not stop soon is killed."""
        self.seen: dict[int, Traces] = {}
        if Space.current is None:
            return
        deadline = time.monotonic() + FORK_S
        while moving := self.look():
            if time.monotonic() > deadline:
                kill(moving)
            time.sleep(0.0001)

    def look(self) -> set[int]:
        """See everything anew; the processes that run."""
        self.seen = {pid: traces(pid) for pid in descendants(os.getpid())}
        return {pid for pid, threads in self.seen.items() if any(state in RUNS for state, _ in threads.values())}

    def broken(self, *, by_others_than: int) -> bool:
        """Whether a process has run since, other than that one; those that have are killed."""
        if Space.current is None:
            return False
        now = {*descendants(os.getpid())}
        moved = {pid for pid in now - {by_others_than} if traces(pid) != self.seen.get(pid, {})}
        kill(moved)
        return bool(moved)


def traces(pid: int) -> Traces:
    """The state of each thread of a process, and how often it gave up the processor."""
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
    """Let none of them run code again; one whose parent lives stays as a zombie."""
    for pid, parent in descendants(os.getpid()).items():
        if pid in pids:
            send_signal(pid, parent, signal.SIGKILL)
