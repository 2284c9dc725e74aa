"""What bounds the code in a sandbox and not the server: capabilities, system calls, processor time and memory."""

from __future__ import annotations

import errno
import os
import resource
import struct

from .kernel import drop_bounding, filter_calls, set_capabilities
from .limits import LIMITS, PR_SET_DUMPABLE, PROC, SYS_MQ_OPEN, libc

ROOT = os.geteuid() == 0
"""Only in an unsafe sandbox: it isolates nothing."""


class Bounds:
    """The bounds of this sandbox, as the host set them."""

    filter = b""
    """The system calls that it may make, as a BPF program; empty where the engine filters them."""
    nice = 0
    """How far it stands back where we share one allowance of processor time: else a fork bomb would hold us up."""


def give_up_power() -> None:
    """From here on this process can do nothing that code in the sandbox may not do."""
    give_up_capabilities()
    os.nice(Bounds.nice)
    if Bounds.filter:
        filter_calls(Bounds.filter)


def give_up_capabilities() -> None:
    if not ROOT:
        drop_bounding()
        set_capabilities(0, 0)


def deny_queues() -> None:
    """Take mq_open away: a kernel that lists no queues (gVisor's) leaves none that a reset could remove."""
    load_number, jump_if_equal, leave = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | errno.ENOSYS, 0x7FFF0000
    steps = [(load_number, 0, 0, 0), (jump_if_equal, 0, 1, SYS_MQ_OPEN), (leave, 0, 0, refuse), (leave, 0, 0, allow)]
    filter_calls(b"".join(struct.pack("HBBI", *step) for step in steps))


class OwnLimits:
    """The limits of the server's own process, which code that sees it can set under some kernels (gVisor's)."""

    def __init__(self) -> None:
        """Take them as they are: before any code runs."""
        self.saved = {number: resource.getrlimit(number) for number in range(LIMITS)}

    def restore(self) -> None:
        """Have them be as they were; OSError where code has lowered one for good, for raising it takes a capability."""
        for number, saved in self.saved.items():
            try:
                if resource.getrlimit(number) != saved:
                    resource.setrlimit(number, saved)
            except ValueError:
                raise OSError("code has lowered a limit of the server's own process") from None


class FirstToDie:
    """Whom the kernel kills first where memory is short: the code in the sandbox, and not the server."""

    fd = -1

    @classmethod
    def watch(cls) -> None:
        """Before this process is closed to others: what they cannot reach, it cannot open either."""
        cls.fd = os.open("self/oom_score_adj", os.O_RDWR, dir_fd=PROC)
        cls.own = os.pread(cls.fd, 16, 0)

    @classmethod
    def children(cls, begin: bool) -> None:
        """Whether what is forked from now on dies before us; a process begins as the one that forks it is then."""
        if cls.fd < 0:
            return
        try:
            os.pwrite(cls.fd, b"1000" if begin else cls.own, 0)
        except OSError:
            pass  # We are where the kernel does not let us go back.

    @classmethod
    def be(cls) -> None:
        """Die before those who have forked us; nobody is here yet who could use that we are open to others for it."""
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        cls.watch()
        cls.children(True)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    own = b"0"
