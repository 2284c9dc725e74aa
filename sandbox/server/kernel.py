"""Kernel calls for which Python 3.9 has no functions: namespaces, mounts, capabilities and system call filters."""

from __future__ import annotations

import ctypes
import os
import signal
import struct

from .limits import PR_GET_TID_ADDRESS, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SYS_CLONE, libc

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any

NEW_MOUNTS, NEW_NAMES, NEW_QUEUES, NEW_USERS, NEW_PROCESSES = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000
"""CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID."""
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
CLONE_PARENT = 0x8000
CLONE_THREAD_ID = 0x200000 | 0x1000000
"""CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID."""
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
HIGHEST_CAPABILITY = 63
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CAPABILITIES_V3 = 0x20080522


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def unshare(spaces: int) -> None:
    check(libc.unshare(spaces), "unshare")


def set_space(fd: int, space: int) -> None:
    """Enter a namespace; for a process namespace, only processes forked from now on enter it."""
    check(libc.setns(fd, space), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode())
    check(libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {kind} on {target}")


def read_only(target: str, flags: int = 0) -> None:
    """Make one mount read-only; devices in it can be used, but their inodes can't be changed."""
    mount("", target, "", REMOUNT | BIND | READ_ONLY | flags)


def thread_id_place() -> Any:
    """Return the address at which the kernel clears this thread's id, or None if the kernel doesn't report it."""
    place = ctypes.c_void_p()
    return None if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0) else place


def clone(flags: int) -> int:
    """Fork with flags, in a process with one thread; return -1 if the kernel refuses or this is not supported.

    The other steps of C's fork are needed only with several threads, and for the cached thread id.
    """
    place = thread_id_place()
    if SYS_CLONE is None or place is None:
        return -1
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    # The last two are the address of the thread id, in either architecture's order.
    pid: int = api.syscall(SYS_CLONE, flags | CLONE_THREAD_ID | signal.SIGCHLD, None, None, place, place)
    if pid:
        api.PyOS_AfterFork_Parent()
    else:
        api.PyOS_AfterFork_Child()
    return pid


def set_capabilities(permitted: int, effective: int) -> None:
    """Keep only these capabilities, given as bits; none is passed on to programs."""
    header = struct.pack("Ii", CAPABILITIES_V3, 0)
    low, high = 0xFFFFFFFF, 32
    sets = (effective & low, permitted & low, 0, effective >> high, permitted >> high, 0)
    check(libc.capset(header, struct.pack("6I", *sets)), "capset")


def drop_bounding() -> None:
    """Drop all capabilities that a program could gain from its file."""
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in range(HIGHEST_CAPABILITY + 1):
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0):
            return


def filter_calls(program: bytes) -> None:
    """Permanently restrict this process and its children to the system calls that a BPF program allows."""
    code = ctypes.create_string_buffer(program, len(program))
    rules = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, rules, 0, 0), "the filter of system calls")
