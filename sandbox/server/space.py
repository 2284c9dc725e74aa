"""A process namespace for the code of a sandbox, and its first process, which controls it for us."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

from .frames import wait
from .kernel import CAP_NET_ADMIN, CAP_SYS_ADMIN, NEW_PROCESSES, set_capabilities, set_space, unshare
from .limits import (
    CREDENTIAL,
    CREDENTIALS,
    FORK_S,
    HIGHEST_FD,
    LISTS_CHILDREN,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    PROC,
    SYS_CLOSE_RANGE,
    libc,
)

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar, NoReturn

ADMIN = 1 << CAP_SYS_ADMIN | 1 << CAP_NET_ADMIN
ORDER = struct.Struct("ci")
SIGNAL, ADOPT, STATUS, REAP = b"s", b"a", b"w", b"r"
"""Orders to a space's first process: signal all, track a child, report its status once it ended, reap the dead."""
READY, FULL = b".", b"f"
"""First message of a space's first process: it is ready, or the sandbox is full.

If it is full, the process that was to be started in the space could not start.
"""


class Space:
    """A process namespace: its processes see and signal each other, but none of ours, and end with their first process.

    Our own processes in the space see the first process as their parent.
    """

    current: Space | None = None
    """The space of this sandbox's code, or None if the code is in our own namespace."""
    first_processes: ClassVar[set[int]] = set()
    """The first processes of all this server's spaces; they are spared when processes in a space are killed."""
    ours = -1
    """Descriptor of the process namespace that we are in."""

    def __init__(self, furnish: Callable[[], object], first: Callable[[], NoReturn], patience_s: float) -> None:
        """Create a space, whose first process will `furnish` it and start a process that runs `first`.

        The first process starts that process itself, so that there is no process between them at any moment.

        Raises:
            BlockingIOError: If the sandbox is full of processes for longer than `patience_s`.
        """
        self.numbers: dict[int, int] = {}
        """Adopted processes, keyed by their process id as we see it; the values are their ids in this space."""
        self.end, theirs = socket.socketpair()
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            with raised():
                set_space(Space.ours, NEW_PROCESSES)
                unshare(NEW_PROCESSES)
                self.pid = fork(patience_s)
                if self.pid == 0:
                    keep_order(theirs, furnish, first, patience_s)
                self.fd = os.open("self/ns/pid_for_children", os.O_RDONLY, dir_fd=PROC)
                children = f"{self.pid}/task/{self.pid}/children"
                self.children = os.open(children, os.O_RDONLY, dir_fd=PROC) if LISTS_CHILDREN else -1
        except BaseException:
            self.end.close()
            raise
        finally:
            theirs.close()
            if Space.current is None:
                Space.current = self
            else:
                Space.current.enter()  # Without this, the next fork would be in the new namespace.
        Space.first_processes.add(self.pid)

    def first(self) -> int:
        """Adopt and return the process that the space's first process started, or raise the error of its start."""
        said, credentials, _, _ = self.end.recvmsg(ORDER.size, CREDENTIALS)
        if said[:1] != READY:
            self.close()
            if said:
                raise BlockingIOError(errno.EAGAIN, "the sandbox is full of processes")
            raise OSError("the first process of a namespace could not start")
        pid: int = CREDENTIAL.unpack(credentials[0][2])[0]
        self.numbers[pid] = answer_of(said)
        return pid

    def enter(self) -> None:
        """Put all processes that are forked from now on into this space."""
        with raised():
            set_space(self.fd, NEW_PROCESSES)

    def fork(self) -> int:
        """Fork a process in this space, through another process; the result is like that of os.fork.

        Raises:
            BlockingIOError: If the sandbox is full, or if code in it delays the new process, which it can see and
                stop.
        """
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with ours, theirs:
            between = os.fork()
            if between == 0:
                begin_as_orphan(ours, theirs)
                return 0
            theirs.close()
            try:
                pid = sender_of_a_byte(ours, time.monotonic() + FORK_S)
            finally:
                os.kill(between, signal.SIGKILL)  # It may have been stopped; its child then gets a parent in the space.
                os.waitpid(between, 0)
            self.adopt(pid)
            with suppress(BrokenPipeError):  # The new process has already ended; its exit shows that.
                ours.send(b".")
        return pid

    def adopt(self, pid: int) -> None:
        """Have the space's first process store this process's exit status until we query it.

        Raises:
            BlockingIOError: If the process is gone already.
        """
        try:
            self.numbers[pid] = self.number(pid)
        except (FileNotFoundError, ProcessLookupError):
            raise BlockingIOError(errno.EAGAIN, "a process of the sandbox ended as soon as it started") from None
        self.order(ADOPT, self.numbers[pid])

    def status(self, pid: int) -> int:
        """Return the status of an adopted process that has ended, in the format of os.waitpid."""
        return self.order(STATUS, self.numbers.pop(pid))

    def number(self, pid: int) -> int:
        """Return the id that a process has in this space."""
        fd = os.open(f"{pid}/status", os.O_RDONLY, dir_fd=PROC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
        line = text.rpartition(b"\nNSpid:")[2].split(b"\n", 1)[0]  # The last: a process's name may look like it.
        return int(line.split()[-1])

    def signal_all(self, number: int) -> None:
        """Signal every process in the space at once, so that none can escape by forking."""
        self.order(SIGNAL, number)

    def reap(self) -> None:
        self.order(REAP, 0)

    def has_orphans(self) -> bool:
        """Return whether the space's first process is gone or may have children that were not adopted."""
        if self.children < 0:
            return True
        found = {*map(int, os.pread(self.children, 4096, 0).split())}
        return not found or not found <= self.numbers.keys()

    def order(self, order: bytes, number: int) -> int:
        self.end.send(ORDER.pack(order, number))
        return answer_of(self.end.recv(ORDER.size))

    def close(self) -> None:
        """Kill every process in the space, and return when it is empty."""
        os.kill(self.pid, signal.SIGKILL)
        self.end.close()
        os.close(self.fd)
        if self.children >= 0:
            os.close(self.children)
        os.waitpid(self.pid, 0)  # The first process ends after all others.
        Space.first_processes.discard(self.pid)

    @classmethod
    def begin(cls) -> None:
        """Open our own namespace, before any space is created."""
        cls.ours = os.open("self/ns/pid", os.O_RDONLY, dir_fd=PROC)


def answer_of(said: bytes) -> int:
    if len(said) != ORDER.size:
        raise SystemExit("the first process of a namespace is gone")
    answer: int = ORDER.unpack(said)[1]
    return answer


def begin_as_orphan(ours: socket.socket, theirs: socket.socket) -> None:
    """Return in a child of this process, once the supervisor knows the child; this process exits.

    The child exits if the supervisor has given up on it: if it wakes up later, it must not continue unsupervised.
    """
    try:
        ours.close()
        if os.fork():
            os._exit(0)
        theirs.send(b".")
        if theirs.recv(1):
            theirs.close()
            return
    except OSError:
        pass
    os._exit(1)


def sender_of_a_byte(end: socket.socket, deadline: float) -> int:
    """Return the id of the process that wrote the byte.

    Raises:
        BlockingIOError: If no process wrote it, because the process was ended or stopped.
    """
    try:
        wait(end.fileno(), select.POLLIN, deadline)
    except TimeoutError:
        raise BlockingIOError(errno.EAGAIN, "code in the sandbox stops new processes") from None
    said, credentials, _, _ = end.recvmsg(1, CREDENTIALS)
    if not said:
        raise BlockingIOError(errno.EAGAIN, "the sandbox is full of processes")
    pid: int = CREDENTIAL.unpack(credentials[0][2])[0]
    return pid


class raised:
    """Enables the capabilities that the kernel requires for creating namespaces, while a block runs."""

    def __enter__(self) -> None:
        set_capabilities(ADMIN, ADMIN)

    def __exit__(self, *_: object) -> None:
        set_capabilities(ADMIN, 0)


def keep_order(
    end: socket.socket, furnish: Callable[[], object], first: Callable[[], NoReturn], patience_s: float
) -> NoReturn:
    """Be the first process of a space, which follows our orders and accepts nothing from the processes in it."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        furnish()
        known: dict[int, int | None] = {start_first(end, first, patience_s): None}  # Counts as adopted.
        set_capabilities(0, 0)
        os.dup2(end.fileno(), 0)
        libc.syscall(SYS_CLOSE_RANGE, 1, ctypes.c_uint(HIGHEST_FD), 0)
        while order := os.read(0, ORDER.size):
            kind, number = ORDER.unpack(order)
            os.write(0, ORDER.pack(READY, obey(kind, number, known)))
    except OSError:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def start_first(end: socket.socket, first: Callable[[], NoReturn], patience_s: float) -> int:
    """Fork the process that runs `first`, and report its id to our parent; return its id here."""
    try:
        number = fork(patience_s)
    except BlockingIOError:
        end.send(ORDER.pack(FULL, 0))
        os._exit(1)
    if number == 0:
        first()
    # The kernel translates it into our parent's number.
    whose = CREDENTIAL.pack(number, os.getuid(), os.getgid())
    end.sendmsg([ORDER.pack(READY, number)], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, whose)])
    return number


def fork(patience_s: float, fork_once: Callable[[], int] = os.fork) -> int:
    """Fork, retrying while the sandbox is full of processes: a control group counts ended ones a little longer."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return fork_once()
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.002)


def obey(order: bytes, number: int, known: dict[int, int | None]) -> int:
    """Carry out one order and return the answer; `known` are the processes whose status will be queried."""
    if order == ADOPT:
        known[number] = None
        return 0  # The adopter has not opened it yet, so it must not be reaped.
    if order == SIGNAL:
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            pass  # No other process is in the space.
    elif order == STATUS and known.get(number) is None:
        known.pop(number, None)
        return os.waitpid(number, 0)[1]
    elif order == STATUS:
        return known.pop(number) or 0
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] in known:
                known[ended[0]] = ended[1]
    except ChildProcessError:
        pass
    return 0
