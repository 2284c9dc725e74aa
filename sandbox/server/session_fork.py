"""The fork of a worker into a branch of its session, as a child of the supervisor."""

from __future__ import annotations

import os
import signal
import time

from .kernel import CLONE_PARENT, clone
from .limits import PR_SET_PDEATHSIG, libc


def is_parent_of_a_fork() -> bool:
    """Fork a process whose parent is the supervisor; return True here, even on failure, and False in the new process.

    As our child, the new process would show up in the session's os.wait(), and only we could reap it.
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
    """Fork a sibling, which is our parent's child from the start; return -1 if that isn't possible."""
    return clone(CLONE_PARENT) if len(os.listdir("/proc/self/task")) == 1 else -1


def fork_orphan() -> int:
    """Fork twice and end the process in between, so that the supervisor adopts the second one; return 0 in that one."""
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
