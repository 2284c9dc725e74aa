"""The namespaces of an episode: private in-memory folders, queues, terminals and processes, which end with it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

from .kernel import (
    BIND,
    NEW_MOUNTS,
    NEW_NAMES,
    NEW_NETWORK,
    NEW_PROCESSES,
    NEW_QUEUES,
    NEW_USERS,
    NO_DEVICES,
    NO_EXEC,
    NO_SUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    mount,
    read_only,
    unshare,
)
from .limits import HIGHEST_FD, PROC, SYS_CLOSE_RANGE, libc

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any

MASKED = ("acpi", "asound", "kcore", "keys", "latency_stats", "scsi", "sched_debug", "timer_list", "timer_stats")
"""Names below /proc that reveal the machine, not the sandbox."""
USER_LIMITS = {"max_inotify_instances": 64, "max_inotify_watches": 8192, "max_user_namespaces": 0}
"""Limits for all processes of a sandbox together; without them, one sandbox could use up what another needs."""
LOOPBACK = {"tcp_max_tw_buckets": 0, "tcp_abort_on_overflow": 1, "tcp_no_metrics_save": 1, "tcp_fastopen": 0}
"""Kernel settings of a sandbox's network.

No closed connection keeps its port: on a loopback, none of its packets can arrive late. No connection of an ended
client waits to be accepted later. TCP's measurements of an address are not saved for the next connection, because the
next episode would find them, as it would find the data that fast open saves.
"""
FIRST_PORT = "sys/net/ipv4/ip_unprivileged_port_start"
SET_FLAGS, UP = 0x8914, 1
"""SIOCSIFFLAGS, IFF_UP."""
TERMINALS = 32
NOBODY = 65534
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class Arena:
    """Creates the namespaces and folders of each episode; raises OSError if the kernel does not allow it."""

    def __init__(self, config: dict[str, Any]) -> None:
        asked = config["arena"]
        self.memory = f"mode=1777,size={asked['bytes']},nr_inodes={asked['inodes']}"
        self.folders: list[str] = [config["work"], config["branches"], "/dev/shm"]
        self.hidden = os.path.join(config["branches"], "hidden")
        self.shared: list[str] = asked["shared"]
        self.networked: bool = asked["networked"]
        self.leads_out: bool = asked["leads_out"]
        self.not_private: list[str] = []
        """The host's folders whose inodes this sandbox shares with others, because the kernel could not cover them."""
        self.groups = os.path.isdir("/sys/fs/cgroup")
        if asked["users"]:
            self.try_out()
            make_users()
        masked = [f"/proc/{name}" for name in MASKED]
        self.masked = {path: os.path.isdir(path) for path in masked if os.path.exists(path)}
        self.begin()

    def try_out(self) -> None:
        """Check in another process that the namespaces and folders can be created.

        A half-finished attempt can't be undone, so this process must not be the first to try.

        Raises:
            OSError: If something failed; the error names it.
        """
        heard, said = os.pipe()
        other = os.fork()
        if other == 0:
            try:
                make_users()
                self.enter_sealed()
                self.seal_hidden()
            except OSError as error:
                os.write(said, f"{error.filename}: {error.strerror}".encode())
            finally:
                os._exit(0)
        os.close(said)
        os.waitpid(other, 0)
        why = os.read(heard, 1000)
        os.close(heard)
        if why:
            raise OSError(0, "namespaces are not available", why.decode())

    def begin(self) -> None:
        """Set up everything that all episodes of the sandbox share."""
        for name in DEVICES:
            path = f"/dev/{name}"
            if os.path.exists(path) and os.stat(path).st_dev != os.stat("/dev").st_dev:
                read_only(path, NO_SUID | NO_EXEC)  # The device belongs to the host.
        self.cover_shared()
        for name, limit in USER_LIMITS.items():
            write_if_there(f"sys/user/{name}", limit)
        if self.networked:
            for name, number in LOOPBACK.items():
                write_if_there(f"sys/net/ipv4/{name}", number)

    def cover_shared(self) -> None:
        """Cover each of the host's folders with our own overlay, so that nobody else sees locks and watches on it."""
        held = {path: os.open(path, os.O_PATH) for path in sorted(self.shared)}
        for path, fd in held.items():  # Outer folders first: covering one also hides everything mounted in it.
            lower = f"/proc/self/fd/{fd}"
            try:
                options = f"lowerdir={lower}:/tmp,userxattr"
                mount("overlay", path, "overlay", READ_ONLY | NO_SUID | NO_DEVICES, options)
            except OSError:
                self.not_private.append(path)
                mount(lower, path, "", BIND)
            os.close(fd)

    def enter(self) -> None:
        """Enter new namespaces with new folders.

        Processes forked from now on are in these namespaces, which end with the last of these processes.
        """
        unshare(NEW_MOUNTS | NEW_NAMES | NEW_QUEUES)
        self.furnish()

    def enter_sealed(self) -> None:
        """Enter new namespaces, and a new network unless the sandbox's network leads outside the sandbox."""
        self.enter()
        if self.leads_out:
            return
        first_port = read_if_there(FIRST_PORT)
        unshare(NEW_NETWORK)
        if self.networked:
            begin_loopback()
            write_if_there(FIRST_PORT, first_port)

    def seal_hidden(self) -> int:
        """Create a folder that is read-only for everyone; return the only descriptor for writing files there.

        The folder itself is a mount point. Otherwise, code could rename or remove a folder above it and replace the
        hidden folder.
        """
        os.mkdir(self.hidden)
        mount("tmpfs", self.hidden, "tmpfs", NO_SUID | NO_DEVICES, self.memory)
        entrance = os.open(self.hidden, os.O_RDONLY | os.O_DIRECTORY)
        mount(self.hidden, self.hidden, "", BIND)
        read_only(self.hidden, NO_SUID | NO_DEVICES)
        return entrance

    def furnish(self) -> None:
        for path in self.folders:
            mount("tmpfs", path, "tmpfs", NO_SUID | NO_DEVICES, self.memory)
        mount("mqueue", "/dev/mqueue", "mqueue", NO_SUID | NO_DEVICES | NO_EXEC)
        terminals = f"newinstance,ptmxmode=0666,mode=620,max={TERMINALS}"
        mount("devpts", "/dev/pts", "devpts", NO_SUID | NO_EXEC, terminals)
        if self.groups:
            cover("/sys/fs/cgroup")

    def show_processes(self) -> None:
        """Mount /proc read-only with the processes of our namespace, and mask the machine's secrets."""
        mount("proc", "/proc", "proc", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC)
        for path, is_folder in self.masked.items():
            if is_folder:
                cover(path)
            else:
                mount("/dev/null", path, "", BIND)


def make_users() -> None:
    """Move into a new user namespace that owns everything we create, and in which we are nobody, whoever we were.

    We continue as a child, the first process of a new process namespace. The parent only waits for the child's end.
    """
    user, group = os.getuid(), os.getgid()
    unshare(NEW_USERS | NEW_MOUNTS | NEW_PROCESSES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    mount("", "/", "", PRIVATE | RECURSIVE)
    child = os.fork()
    if child:
        libc.syscall(SYS_CLOSE_RANGE, 0, ctypes.c_uint(HIGHEST_FD), 0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    mount("proc", "/proc", "proc", NO_SUID | NO_DEVICES | NO_EXEC)
    hold_proc()


def hold_proc() -> None:
    """Keep /proc, the kernel's view of our namespace's processes, open as the descriptor PROC."""
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if proc != PROC:
        os.dup2(proc, PROC, inheritable=False)
        os.close(proc)


def begin_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        fcntl.ioctl(end, SET_FLAGS, struct.pack("16sh22x", b"lo", UP))


def cover(folder: str) -> None:
    """Cover a folder with an empty one."""
    mount("tmpfs", folder, "tmpfs", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC, "mode=555,size=4k,nr_inodes=2")


def read_if_there(path: str) -> int:
    """Return a kernel limit, or 0 if there is none of that name."""
    try:
        fd = os.open(path, os.O_RDONLY, dir_fd=PROC)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 32))
    finally:
        os.close(fd)


def write_if_there(path: str, number: int) -> None:
    """Set a kernel limit if it exists and we may set it."""
    try:
        fd = os.open(path, os.O_WRONLY, dir_fd=PROC)
    except OSError:
        return
    try:
        os.write(fd, str(number).encode())
    except OSError:
        pass
    finally:
        os.close(fd)
