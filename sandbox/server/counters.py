"""Counters of the sandbox's control group, read through files that are opened before any code runs."""

from __future__ import annotations

import os


class OomCounter:
    """Counts the processes of this sandbox that the kernel killed because memory ran out; always 0 without a cgroup."""

    FILES = (("/sys/fs/cgroup/memory.events", b"oom_kill "), ("/sys/fs/cgroup/memory/memory.oom_control", b"oom_kill "))

    def __init__(self) -> None:
        self.fd: int | None = None
        for path, key in self.FILES:
            try:
                self.fd, self.key = os.open(path, os.O_RDONLY), key
                break
            except OSError:
                continue

    def read(self) -> int:
        if self.fd is None:
            return 0
        for line in os.pread(self.fd, 4096, 0).splitlines():
            if line.startswith(self.key):
                return int(line.split()[1])
        return 0


class Places:
    """Checks how many more processes the sandbox can start.

    A bubblewrap sandbox has no control group, so nothing is counted.
    """

    FOLDERS = ("/sys/fs/cgroup", "/sys/fs/cgroup/pids")

    def __init__(self, reserve: int) -> None:
        """Open the counters; `reserve` is the number of processes that a verifier must be able to start."""
        self.reserve = reserve
        self.files: tuple[int, int] | None = None
        for folder in self.FOLDERS:
            try:
                self.files = os.open(f"{folder}/pids.max", os.O_RDONLY), os.open(f"{folder}/pids.current", os.O_RDONLY)
                break
            except OSError:
                continue

    def are_few(self) -> bool:
        if self.files is None:
            return False
        most, used = (os.pread(fd, 64, 0).strip() for fd in self.files)
        return most.isdigit() and int(most) - int(used) < self.reserve
