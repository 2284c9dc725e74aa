"""What bounds the code in a box and not the server: capabilities, system calls and processor time."""

from __future__ import annotations

import errno
import os
import struct

from .kernel import drop_bounding, filter_calls, set_capabilities
from .limits import SYS_MQ_OPEN

ROOT = os.geteuid() == 0
"""Only in an unsafe box: it isolates nothing."""


class Bounds:
    """The bounds of this box, as the host set them."""

    filter = b""
    """The system calls that it may make, as a BPF program; empty where the engine filters them."""
    nice = 0
    """How far it stands back where we share one allowance of processor time: else a fork bomb would hold us up."""


def give_up_power() -> None:
    """From here on this process can do nothing that code in the box may not do."""
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
