"""The memory and the processors that this process may use."""

import os
import re
import resource
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Folder of the process's control group in a container."""


def usable_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that this process may use: the machine's, or the container's limit if it is lower.

    Args:
        cgroup: Folder of the control group.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_number(cgroup / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([machine, *(limit for limit in limits if limit)])


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        status = ""
    if (found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)) is not None:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # On Linux, it includes the process that forked this one.
    return peak if sys.platform == "darwin" else peak * 1024


def usable_processors(cgroup: Path = CGROUP) -> int:
    """Return the number of processors that this process may use, at least 1.

    It is `OMP_NUM_THREADS` if that is set. Otherwise, it is limited by the process's affinity and the container's
    quota, and shared with the other processes that torchrun started on this machine.

    Args:
        cgroup: Folder of the control group.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, _quota(cgroup) or count) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _quota(cgroup: Path) -> int | None:
    """Return the processors that the control group may use at a time, rounded up; None if it sets no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):  # no control groups of version 2, or "max"
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None
