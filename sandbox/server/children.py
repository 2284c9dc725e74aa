"""The supervisor's children, forked with separate pipes and without a descriptor of the host's connection."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # Without the enums, which take ten times as long.
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket

from .bounds import FirstToDie, deny_queues, give_up_power
from .frames import Channel, wait
from .limits import (
    CHANNEL,
    CHANNEL_LOST,
    HIGHEST_FD,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    SYS_CLOSE_RANGE,
    libc,
)
from .space import Space, fork

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn


class Exits:
    """A pipe that gets a byte whenever a child has ended, for kernels without pidfd_open (gVisor's)."""

    pipe: tuple[int, int] | None = None

    @classmethod
    def watch(cls) -> None:
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            cls.pipe = os.pipe()
            for fd in cls.pipe:
                os.set_blocking(fd, False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(cls.pipe[1], warn_on_full_buffer=False)

    @classmethod
    def forget(cls) -> None:
        """Drop the pipe in a forked child, because the pipe belongs to the parent."""
        if cls.pipe is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    @classmethod
    def open(cls, pid: int) -> int:
        """Return a new descriptor that is readable once this child has ended, or may have ended."""
        return os.pidfd_open(pid) if cls.pipe is None else os.dup(cls.pipe[0])

    @classmethod
    def tell_again(cls) -> None:
        """Put a byte back into the pipe after `clear`, so that another waiter also checks its child."""
        if cls.pipe is not None:
            os.write(cls.pipe[1], b"\0")

    @classmethod
    def clear(cls) -> None:
        if cls.pipe is not None:
            try:
                while os.read(cls.pipe[0], 4096):
                    pass
            except BlockingIOError:
                pass


ENDED: dict[int, int | None] = {}
"""Exit codes of our children, None while they run; whoever reaps a child records its code here for others."""


class Child:
    """A process that the supervisor forked, and the supervisor's ends of its pipes."""

    def __init__(
        self, pid: int, out: int, err: int, end: socket.socket | None, host: int, space: Space | None = None
    ) -> None:
        self.pid, self.out, self.err, self.space = pid, out, err, space
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        self.channel = None if end is None else Channel(end, pid)
        self.exit = Exits.open(pid)
        ENDED[pid] = None
        self.ending = select.poll()
        self.ending.register(self.exit, select.POLLIN)
        self.urgent, self.all = select.poll(), select.poll()
        said = [] if self.channel is None else [self.channel.fd]
        for fd in (*said, host, self.exit):  # The channel comes first: an answer counts before an exit.
            self.urgent.register(fd, select.POLLIN)
        for fd in (*said, out, err, host, self.exit):
            self.all.register(fd, select.POLLIN)

    def close(self) -> None:
        ENDED.pop(self.pid, None)
        if self.space is not None:
            self.space.numbers.pop(self.pid, None)
        for fd in (self.exit, self.out, self.err):
            os.close(fd)
        if self.channel is not None:
            self.channel.close()

    def watch(self, fd: int) -> None:
        """Poll another descriptor, too."""
        for poll in (self.urgent, self.all):
            poll.register(fd, select.POLLIN)

    def deafen(self, fd: int) -> None:
        """Stop polling a descriptor whose other end is closed."""
        for poll in (self.urgent, self.all):
            try:
                poll.unregister(fd)
            except KeyError:
                continue

    def ended(self) -> bool:
        """Return whether the process has ended, reaped or not."""
        Exits.clear()
        if Exits.pipe is None:
            return bool(self.ending.poll(0))
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def interrupt(self, *, its_group: bool = False) -> None:
        """Send SIGINT to the process or its group, unless the process has ended, as its number may then be reused."""
        if self.ended():
            return
        try:
            (os.killpg if its_group else os.kill)(self.pid, signal.SIGINT)
        except ProcessLookupError:
            pass

    def ends(self, deadline: float) -> bool:
        """Return whether the process ends before the deadline."""
        while not self.ended():
            try:
                wait(self.exit, select.POLLIN, deadline)
            except TimeoutError:
                return False
        return True

    def exited(self) -> int:
        """Reap the process, which has ended, and return its exit code, or the negative number of its signal."""
        if self.space is not None:
            return os.waitstatus_to_exitcode(self.space.status(self.pid))
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            code = ENDED.get(self.pid)
            return -signal.SIGKILL if code is None else code  # None: reaped among the processes that we killed.


def start(
    run: Callable[[], object],
    work: str,
    limits: dict[str, int],
    patience_s: float,
    host: int,
    *,
    channel: bool,
    sealed: bool,
    stdin: int | None = None,
    extra: Sequence[int] = (),
) -> Child:
    """Fork a process next to the sandbox's code, and call `run` in it.

    It has separate pipes, and no descriptor of the host's connection. It reads from `stdin`, or else from /dev/null.
    With `channel`, its descriptor 3 is its end of a new channel to us. Otherwise, the descriptors in `extra` become its
    descriptors 3 and up. If it is `sealed`, other processes of the same user can neither trace it nor read its memory.
    While the sandbox is full of processes, the fork is retried for `patience_s` seconds. `host` is our descriptor of
    the host's connection, which is polled together with the child's pipes.
    """
    space = Space.current
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    ends = channel_pair() if channel else None
    FirstToDie.children(True)
    try:
        pid = fork(patience_s, os.fork if space is None else space.fork)
    except OSError:
        for fd in (out, out_end, err, err_end):
            os.close(fd)
        for end in ends or ():
            end.close()
        raise
    finally:
        FirstToDie.children(False)
    if pid == 0:
        given = extra if ends is None else (ends[1].fileno(),)
        become(run, 0 if stdin is None else stdin, out_end, err_end, given, work, limits, sealed=sealed)
    os.close(out_end)
    os.close(err_end)
    if ends is not None:
        ends[1].close()
    return Child(pid, out, err, ends and ends[0], host, space)


def become(
    run: Callable[[], object],
    stdin: int,
    out: int,
    err: int,
    given: Sequence[int],
    work: str,
    limits: dict[str, int],
    *,
    sealed: bool,
    before: Callable[[int], Sequence[int]] | None = None,
) -> NoReturn:
    """Turn the forked process into a child: give up everything that it may not have, and call `run`.

    `before` runs while the process still has everything that we have. It gets the process's stderr, and returns further
    descriptors to keep.
    """
    try:
        if before is not None:
            given = (*given, *before(err))
        if stdin:
            os.dup2(stdin, 0)
        enter(out, err, given, work, limits, sealed=sealed)
        run()
    except Exception as error:
        os.write(2, f"the process could not start: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(CHANNEL_LOST)


def start_in_space(
    run: Callable[[], object],
    furnish: Callable[[], object],
    work: str,
    limits: dict[str, int],
    patience_s: float,
    host: int,
    *,
    sealed: bool,
    before: Callable[[int], Sequence[int]] | None = None,
) -> Child:
    """Fork a process with a channel, like `start`, as the first to run code in a new space (process namespace).

    `furnish` runs in the space's first process, which controls the space; `before` is as for `become`.
    """
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    ours, theirs = channel_pair()

    def first() -> NoReturn:
        FirstToDie.be()
        become(run, 0, out_end, err_end, (theirs.fileno(),), work, limits, sealed=sealed, before=before)

    try:
        space = Space(furnish, first, patience_s)
        pid = space.first()
    except BaseException:
        os.close(out)
        os.close(err)
        ours.close()
        raise
    finally:
        os.close(out_end)
        os.close(err_end)
        theirs.close()
    return Child(pid, out, err, ours, host, space)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return the supervisor's end, on which the kernel reports who writes, and the worker's end."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return ours, theirs


def close_from(first: int) -> None:
    """Close every descriptor from `first` on, however high its number is."""
    if libc.syscall(SYS_CLOSE_RANGE, first, ctypes.c_uint(HIGHEST_FD), 0) == 0:
        return
    for fd in open_descriptors():
        if fd >= first:
            os.close(fd)


def open_descriptors() -> list[int]:
    """Return every open descriptor of this process, whatever its limit of open files is."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # The listing's own descriptor.
        found.append(int(name))
    return found


def keep_only(allowed: set[int]) -> None:
    """Close every descriptor except the lowest ones, which are `allowed`; raise SystemExit if another one is left.

    With a descriptor of the host's connection, a worker's code could forge answers, so this is checked, not assumed.
    """
    close_from(max(allowed) + 1)
    left = sorted(set(open_descriptors()) - allowed)
    if left:
        os.write(2, f"descriptors {left} are open, which no worker may have\n".encode())
        raise SystemExit(CHANNEL_LOST)


def enter(out: int, err: int, given: Sequence[int], work: str, limits: dict[str, int], *, sealed: bool) -> None:
    """Become a child with a separate Unix session, pipes and limits; close all of the supervisor's descriptors."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    # Copy them to higher numbers first, because one may have the number that another one is to get.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, CHANNEL + len(given)) for fd in given]
    for number, fd in enumerate(copies, CHANNEL):
        os.dup2(fd, number, inheritable=False)
    keep_only({0, 1, 2, *range(CHANNEL, CHANNEL + len(given))})
    Exits.forget()
    for number in QUIET:
        _signal.signal(number, _signal.SIG_DFL)
    if sealed:  # Our own processes report that a file is too large instead of dying of it.
        _signal.signal(_signal.SIGXFSZ, _signal.SIG_IGN)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Sealed against ptrace and /proc/<pid>/mem by other processes of the same user.
    libc.prctl(PR_SET_DUMPABLE, 0 if sealed else 1, 0, 0, 0)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if not os.path.exists("/proc/sysvipc"):
        deny_queues()
    try:
        os.chdir(work)
    except OSError:
        os.chdir("/")
    give_up_power()


# Ignored, not handled: a handler would make pid 1 accept signals from inside.
QUIET = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})
