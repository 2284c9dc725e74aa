"""How a worker forks a branch of its session, as a child of the supervisor."""

from __future__ import annotations

import os
import signal
import time

from .kernel import CLONE_PARENT, clone
from .limits import PR_SET_PDEATHSIG, libc


def is_parent_of_a_fork() -> bool:
    """Fork a process that the supervisor is the parent of; True here, also where it failed, False in the new one.

    As a child of ours it would turn up in the session's own os.wait(), and nobody else could collect it.
    """
    try:
        pid = fork_sibling()
        if pid > 0 or (pid < 0 and fork_orphan()):
            return True
    except OSError:
        return True
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return False


def fork_sibling() -> int:
    """os.fork as the kernel has it too: its process is our parent's child from the start. -1 where it cannot be."""
    return clone(CLONE_PARENT) if len(os.listdir("/proc/self/task")) == 1 else -1


def fork_orphan() -> int:
    """Fork twice and end the process in between, so that the supervisor takes the second over; 0 in that one."""
    between = os.fork()
    if between:
        try:
            os.waitpid(between, 0)
        except ChildProcessError:
            pass
        return between
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.0002)
    return 0
