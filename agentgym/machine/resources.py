"""The memory and the processors that this process may use."""

import os
import re
import resource
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Folder of all control groups, or of the container's in a container."""
MEMBER = Path("/proc/self/cgroup")
"""File that names this process's control group below that folder."""


def usable_memory(cgroup: Path = CGROUP, member: Path = MEMBER) -> int:
    """Return the bytes of memory that this process may use.

    It is the machine's memory, or the limit of a control group that contains this process, such as a container's or a
    batch job's, if that is lower. It is shared with the other processes that torchrun started on this machine.

    Args:
        cgroup: Folder of the control groups.
        member: File that names this process's control group.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_number(group / "memory.max") for group in _groups(cgroup, member)]
    limits += [_number(group / "memory.limit_in_bytes") for group in _groups(cgroup / "memory", member, "memory")]
    return min([machine, *(limit for limit in limits if limit)]) // _processes()


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


def usable_processors(cgroup: Path = CGROUP, member: Path = MEMBER) -> int:
    """Return the number of processors that this process may use, at least 1.

    It is `OMP_NUM_THREADS` if that is set. Otherwise, it is limited by the process's affinity and the quotas of its
    control groups, and shared with the other processes that torchrun started on this machine.

    Args:
        cgroup: Folder of the control groups.
        member: File that names this process's control group.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups(cgroup, member) if (quota := _quota(group))]
    return max(1, min([count, *quotas]) // _processes())


def _processes() -> int:
    """Return the number of processes that torchrun started on this machine, 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _groups(cgroup: Path, member: Path, controller: str = "") -> list[Path]:
    """Return the folders of this process's control group and of those that contain it.

    Args:
        cgroup: Folder of the control groups.
        member: File that names this process's control group.
        controller: Name of the controller in version 1 of control groups; "" for version 2.
    """
    try:
        named = re.search(rf"^\d+:{controller}:/(.*)$", member.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        named = None
    own = cgroup / (named[1] if named else "")
    return [own, *(group for group in own.parents if group.is_relative_to(cgroup))]


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
