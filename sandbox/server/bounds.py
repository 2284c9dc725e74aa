"""Bounds for the code in a sandbox, but not for the server: capabilities, system calls, processor time and memory."""

from __future__ import annotations

import errno
import os
import resource
import struct

from .kernel import drop_bounding, filter_calls, set_capabilities
from .limits import LIMITS, PR_SET_DUMPABLE, PROC, SYS_MQ_OPEN, libc

ROOT = os.geteuid() == 0
"""Whether we are root. That is the case only in an unsafe sandbox, which isolates nothing."""


class Bounds:
    """The bounds of this sandbox, as set by the host."""

    filter = b""
    """The allowed system calls, as a BPF program; empty if the engine filters them."""
    nice = 0
    """The code's nice value, which keeps a fork bomb from starving us if we share one CPU limit with the code."""


def give_up_power() -> None:
    """Restrict this process to what code in the sandbox may do."""
    give_up_capabilities()
    os.nice(Bounds.nice)
    if Bounds.filter:
        filter_calls(Bounds.filter)


def give_up_capabilities() -> None:
    if not ROOT:
        drop_bounding()
        set_capabilities(0, 0)


def deny_queues() -> None:
    """Deny mq_open: on a kernel that lists no queues (gVisor's), a reset could not remove them."""
    load_number, jump_if_equal, leave = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | errno.ENOSYS, 0x7FFF0000
    steps = [(load_number, 0, 0, 0), (jump_if_equal, 0, 1, SYS_MQ_OPEN), (leave, 0, 0, refuse), (leave, 0, 0, allow)]
    filter_calls(b"".join(struct.pack("HBBI", *step) for step in steps))


class OwnLimits:
    """The limits of the server's process, which code that sees the process can change under some kernels (gVisor's)."""

    def __init__(self) -> None:
        """Save the limits before any code runs."""
        self.saved = {number: resource.getrlimit(number) for number in range(LIMITS)}

    def restore(self) -> None:
        """Restore the saved limits.

        Raises:
            OSError: If code has permanently lowered a limit, because raising it takes a capability.
        """
        for number, saved in self.saved.items():
            try:
                if resource.getrlimit(number) != saved:
                    resource.setrlimit(number, saved)
            except ValueError:
                raise OSError("code has lowered a limit of the server's own process") from None


class FirstToDie:
    """Makes the kernel kill the sandbox's code, not the server, first when memory runs out."""

    fd = -1

    @classmethod
    def watch(cls) -> None:
        """Open our OOM score (how early the kernel kills us) before this process is sealed.

        A sealed process, which others of the same user can't trace, can't open the file itself.
        """
        cls.fd = os.open("self/oom_score_adj", os.O_RDWR, dir_fd=PROC)
        cls.own = os.pread(cls.fd, 16, 0)

    @classmethod
    def children(cls, begin: bool) -> None:
        """Set whether processes forked from now on are killed before us; each inherits our current score."""
        if cls.fd < 0:
            return
        try:
            os.pwrite(cls.fd, b"1000" if begin else cls.own, 0)
        except OSError:
            pass  # This kernel doesn't let us restore our score.

    @classmethod
    def be(cls) -> None:
        """Make the kernel kill this process before the ones that forked it.

        The process is unsealed meanwhile, but it runs no code of the sandbox yet that could abuse that.
        """
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        cls.watch()
        cls.children(True)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    own = b"0"
