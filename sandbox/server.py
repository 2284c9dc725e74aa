"""The inside of a box: a supervisor that holds the only wire to the host, and the workers it forks from itself.

::

    python3 -I -S -B server.py '{"connect": "/run/agentgym/box.sock", "work": "/tmp", "branches": "/branches",
                                 "wipe": ["/tmp", "/branches"], "limits": {}}'

    frame    4-byte big-endian length | JSON envelope | as many raw bytes as the envelope's "body" says
    host     {"id", "session", "op", ...}                               a call, one at a time; `op` is one of
             python exec write read list fork end reset
             {"id", "answer": k} + JSON body, {"id", "op": "cancel"}    inside a running call
    here     {"hello", "python"} once;  {"id", "ask": k} + JSON body;  {"id", ...} ends the call

Session 0 is the trunk. `fork` makes another that goes on from where a session stands: its own process, its own copy of
the working folder. The supervisor alone says what happened: limits, signals, cut output and lost state are facts that
it saw.
Bodies (code, commands, files, output, questions and answers) pass through buffers that are zeroed after use:
the supervisor is also the zygote, and a worker forked later must find nothing of earlier calls in its memory.

Standard library only, Linux 5.3 and Python 3.9 or newer; nothing here is imported by the host.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import json
import linecache
import os
import resource
import select
import signal
import site
import socket
import stat
import struct
import sys
import time
import traceback
import types
from _ast import Expr, Expression, Module, PyCF_ONLY_AST
from _signal import signal as set_handler  # type: ignore[import-not-found]  # The enumerations around it take ten times as long.
from _thread import allocate_lock

TYPE_CHECKING = False  # Importing typing would cost each new box some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

PROTOCOL = 1
MAX_ENVELOPE = 1 << 20
MAX_BODY = 17 << 20
MAX_WORKER_ENVELOPE = 4096
MAX_ASK = 1 << 20
MAX_ASKS = 2000
"""The host refuses politely at half of this; a worker that asks on is not ours any more."""
KEEP = 32 << 10
"""Bytes of output kept from the head and from the tail, per stream."""
HARD_OUTPUT = 16 << 20
GRACE_S = 0.3
FORK_S = 5.0
MAX_BRANCHES = 64
MAX_DEPTH = 100
"""How deep a working folder may be to be copied: each level holds two descriptors."""
TRUNK = 0
KILL_S = 1.0
"""How long one process after the other is killed; whoever forks faster is met by killing all at once."""
PATIENCE_S = 0.5
"""How long a worker may take over one frame."""
AHEAD = 16 << 10
"""Bytes that are read ahead of the frame that is taken."""
ZEROS = bytes(KEEP)
CREDENTIALS = socket.CMSG_SPACE(12)
"""Room for the process, user and group that wrote; or for three descriptors."""
OUTPUT_LATER_S = 0.002
"""How long a call's output may lie in its pipe: most calls have ended by then, and wake the supervisor once."""
CHANNEL = 3
"""The worker's end of its channel."""
WIRE_IN, WIRE_OUT = 3, 4
"""Where the supervisor holds the host's wire, whatever number the client had for it."""
HIGHEST_FD = (1 << 32) - 1
SYS_CLOSE_RANGE = 436
"""The same number on every architecture."""
CHANNEL_LOST = 70
"""The exit code of a worker that cannot answer any more."""
LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
ALONE = os.getpid() == 1
"""In a process namespace of our own; only then may every process be signalled."""
IPC_RMID = 0
MAX_IPC = 65_536
"""How many System V objects of a kind are looked for where not even one more can be made."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_GET_TID_ADDRESS = 1, 4, 36, 40
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SYS_MQ_OPEN = {"x86_64": 240, "aarch64": 180}.get(os.uname().machine, 0xFFFFFFFF)
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
CLONE_FLAGS = 0x8000 | 0x200000 | 0x1000000 | signal.SIGCHLD
"""CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID."""

LENGTH = struct.Struct(">I")
CREDENTIAL = struct.Struct("3i")

libc = ctypes.CDLL(None, use_errno=True)
decode = json.JSONDecoder().raw_decode  # What json.loads does around it takes longer than it does.


class Broken(Exception):
    """The other end sent what the protocol does not allow."""


class Refused(Exception):
    """A path or a size that the file calls do not take; the text goes to the host."""


class NotAFile(Refused):
    """A link, a pipe, a socket or a device."""


# ---------------------------------------------------------------------------------------------- frames


def wait(fd: int, event: int, deadline: float | None) -> None:
    """Return when `fd` is ready; TimeoutError at `deadline`."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def write_fully(fd: int, parts: Iterable[bytes | bytearray | memoryview], deadline: float | None) -> None:
    """Write every part, in order."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        try:
            count = os.writev(fd, left)
        except BlockingIOError:
            wait(fd, select.POLLOUT, deadline)
            continue
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def write_frame(
    fd: int,
    envelope: dict[str, Any],
    body: Iterable[bytes | bytearray | memoryview] = (),
    deadline: float | None = None,
) -> None:
    """One frame; `body` is the parts of its body."""
    parts = list(body)
    if parts:
        envelope["body"] = sum(map(len, parts))
    head = json.dumps(envelope).encode()
    write_fully(fd, [LENGTH.pack(len(head)), head, *parts], deadline)


def zero(buffer: bytearray) -> None:
    """Overwrite in place, so that no later fork finds the content."""
    buffer[:] = bytes(len(buffer))


class Inlet:
    """Whole frames from one descriptor, read ahead into a buffer; what was taken from it is zeroed."""

    def __init__(self, fd: int, *, max_envelope: int, max_body: int) -> None:
        self.fd, self.max_envelope, self.max_body = fd, max_envelope, max_body
        self.ahead = memoryview(bytearray(AHEAD))
        self.start = self.stop = 0

    @property
    def pending(self) -> bool:
        """Whether something was read that no frame has taken yet: then no poll will tell of it."""
        return self.start < self.stop

    def read(self, deadline: float | None) -> tuple[dict[str, Any], bytearray]:
        """One frame; Broken where it is malformed or too large, EOFError at the end of the wire."""
        (size,) = LENGTH.unpack(self.take(LENGTH.size, deadline))
        if size > self.max_envelope:
            raise Broken
        try:
            text = self.take(size, deadline).decode()
            envelope, end = decode(text)
        except (ValueError, RecursionError):
            raise Broken from None
        if type(envelope) is not dict or end != len(text):
            raise Broken
        length = envelope.get("body", 0)
        if type(length) is not int or not 0 <= length <= self.max_body:
            raise Broken
        return envelope, self.take(length, deadline)

    def take(self, size: int, deadline: float | None) -> bytearray:
        """`size` bytes in a buffer of exactly that size; EOFError where the other end closed."""
        data = bytearray(size)
        view = memoryview(data)
        got = 0
        while got < size:
            if self.start == self.stop:
                if size - got >= AHEAD:
                    got += self.receive(view[got:], deadline)
                    continue
                self.start, self.stop = 0, self.receive(self.ahead, deadline)
            count = min(size - got, self.stop - self.start)
            part = self.ahead[self.start : self.start + count]
            view[got : got + count] = part
            part[:] = ZEROS[:count]
            got += count
            self.start += count
        return data

    def receive(self, into: memoryview, deadline: float | None) -> int:
        """How many bytes came, at least one; EOFError where the other end closed."""
        while True:
            try:
                count = self.receive_some(into)
            except BlockingIOError:
                wait(self.fd, select.POLLIN, deadline)
                continue
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise EOFError
            return count

    def receive_some(self, into: memoryview) -> int:
        return os.readv(self.fd, [into])


class Wire(Inlet):
    """The host's wire: one socket, or two pipes where an engine carries our input and output."""

    def __init__(self, inlet: int, outlet: int) -> None:
        super().__init__(inlet, max_envelope=MAX_ENVELOPE, max_body=MAX_BODY)
        self.outlet = outlet

    def write(self, envelope: dict[str, Any], body: Iterable[bytes | bytearray | memoryview] = ()) -> None:
        write_frame(self.outlet, envelope, body)


class Channel(Inlet):
    """The supervisor's end of a worker's channel: frames of that process alone, whoever else holds the other end."""

    def __init__(self, end: socket.socket, pid: int) -> None:
        super().__init__(end.fileno(), max_envelope=MAX_WORKER_ENVELOPE, max_body=MAX_ASK)
        self.end, self.pid = end, pid

    def receive_some(self, into: memoryview) -> int:
        """The kernel says who wrote, and never hands over what two wrote at once; Broken for a stranger's bytes."""
        count, facts, _, _ = self.end.recvmsg_into([into], CREDENTIALS)
        if count and (not facts or CREDENTIAL.unpack(facts[0][2])[0] != self.pid):
            raise Broken
        return count

    def write(self, envelope: dict[str, Any], body: Iterable[bytes | bytearray | memoryview] = ()) -> None:
        """OSError where the worker does not take it soon."""
        write_frame(self.fd, envelope, body, time.monotonic() + PATIENCE_S)

    def close(self) -> None:
        self.end.close()


class WorkerEnd(Inlet):
    """The worker's end, with the descriptors that came along."""

    def __init__(self) -> None:
        super().__init__(CHANNEL, max_envelope=MAX_ENVELOPE, max_body=MAX_BODY)
        self.end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=CHANNEL)
        self.fds: list[int] = []

    def receive_some(self, into: memoryview) -> int:
        count, extras, _, _ = self.end.recvmsg_into([into], CREDENTIALS)
        for _, _, data in extras:
            self.fds += CREDENTIAL.unpack(data)
        return count


# ---------------------------------------------------------------------------------------------- worker


class Worker:
    """The process that runs Python cells; after the first cell nothing it says is trusted."""

    def __init__(self, work: str, *, shadowing: bool) -> None:
        self.pid = os.getpid()
        self.work = work
        self.call = 0
        self.asked = 0
        self.cells = 0
        self.running = False
        self.lock = allocate_lock()
        self.inlet = WorkerEnd()
        self.proxies: dict[str, object] = {}
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.names = main.__dict__
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # As every Python has them: OSError rather than death.
        os.environ.update(own_folder(work))
        # A verifier's `import re` must not find the re.py that the code under test left in the folder.
        sys.path.insert(0 if shadowing else len(sys.path), work)

    def serve(self) -> NoReturn:
        """Run cells until the channel closes."""
        while True:
            try:
                envelope, body = self.inlet.read(None)
                if "fork" in envelope:
                    self.branch(envelope["fork"])
                    continue
                if "functions" not in envelope:
                    continue  # The answer to a question that was interrupted.
                self.call = envelope["id"]
                self.offer(envelope["functions"])
                code = self.run(body.decode("utf-8", "replace"))
                if os.getpid() != self.pid:
                    os._exit(0)  # A forked child that fell out of the cell must not answer a second time.
                said = b'{"id": %d, "done": %d}' % (self.call, code)
                os.write(CHANNEL, LENGTH.pack(len(said)) + said)
            except KeyboardInterrupt:
                continue
            except BaseException:
                os._exit(CHANNEL_LOST)

    def branch(self, folder: str) -> None:
        """Return twice: here, and in a process that goes on as a session of its own in `folder`."""
        self.inlet.take(1, None)  # The byte that the descriptors come with.
        ends, self.inlet.fds = self.inlet.fds, []
        random = sys.modules.get("random")
        state = random.getstate() if random is not None else None
        if is_parent_of_a_fork():
            for fd in ends:
                os.close(fd)
            return
        for end, fd in zip(ends, (CHANNEL, 1, 2)):
            os.dup2(end, fd, inheritable=fd != CHANNEL)
        for end in {*ends} - {CHANNEL, 1, 2}:
            os.close(end)
        self.pid = os.getpid()
        self.lock = allocate_lock()
        if random is not None:
            random.setstate(state)  # Python seeds it anew in a forked child; a branch goes on as the trunk does.
        self.move(folder)
        os.write(CHANNEL, b"\0")

    def move(self, folder: str) -> None:
        """From the old working folder into its copy."""
        here = os.getcwd()
        sys.path[:] = [folder if path == self.work else path for path in sys.path]
        os.environ.update(own_folder(folder))
        if "tempfile" in sys.modules:
            sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
        inside = here == self.work or here.startswith(self.work + "/")
        try:
            os.chdir(folder + here[len(self.work) :] if inside else here)
        except OSError:
            os.chdir(folder)
        self.work = folder

    def run(self, source: str) -> int:
        """One cell; its exit code."""
        self.cells += 1
        set_handler(signal.SIGINT, self.interrupt)
        code = 1
        try:
            try:
                self.running = True
                code = self.execute(source, f"<cell {self.cells}>")
            finally:
                self.running = False
                flush()
        except BaseException as error:
            report(error)
        return code

    def execute(self, source: str, filename: str) -> int:
        try:
            tree = compile(source, filename, "exec", PyCF_ONLY_AST, dont_inherit=True)
            assert isinstance(tree, Module)
            linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
            if tree.body:
                exec(compile(tree, filename, "exec", dont_inherit=True), self.names)
            if isinstance(last, Expr):
                value = eval(compile(Expression(last.value), filename, "eval", dont_inherit=True), self.names)
                if value is not None:
                    sys.stdout.write(repr(value) + "\n")
        except SystemExit as leaving:
            return exit_code(leaving)
        return 0

    def interrupt(self, _number: int, _frame: types.FrameType | None) -> None:
        if self.running:
            raise KeyboardInterrupt

    def offer(self, names: list[str]) -> None:
        """Bind this call's host functions and take back the last call's."""
        for name, proxy in self.proxies.items():
            if self.names.get(name) is proxy:
                del self.names[name]
        self.proxies = {name: self.proxy(name) for name in names}
        self.names.update(self.proxies)

    def proxy(self, name: str) -> Callable[..., object]:
        def function(*args: object, **kwargs: object) -> object:
            return self.ask(name, args, kwargs)

        function.__name__ = function.__qualname__ = name
        return function

    def ask(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call a function of the host; RuntimeError with the host's text where it failed."""
        if not self.running or os.getpid() != self.pid:
            raise RuntimeError(f"{name} can be called only from a running cell, in its own process")
        body = json.dumps([name, args, kwargs]).encode()
        if len(body) > MAX_ASK:
            raise ValueError(f"{name}: arguments of {len(body)} bytes, the limit is {MAX_ASK}")
        with self.lock:
            self.asked += 1
            write_frame(CHANNEL, {"id": self.call, "ask": self.asked}, [body])
            while True:
                envelope, answer = self.inlet.read(None)
                if envelope.get("answer") == self.asked:
                    break
        said = json.loads(answer)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["value"]


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
    """os.fork as the kernel has it too: its process is our parent's child from the start. -1 where this cannot be done.

    What C's fork does beside it is needed with several threads only, and for the cached thread id, which lies where
    the kernel was asked to clear it when the thread ends.
    """
    thread_id = ctypes.c_void_p()
    alone = len(os.listdir("/proc/self/task")) == 1
    if SYS_CLONE is None or not alone or libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(thread_id), 0, 0, 0):
        return -1
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    # The last two: the place of the thread id, in the order of either architecture.
    pid: int = api.syscall(SYS_CLONE, CLONE_FLAGS, None, None, thread_id, thread_id)
    if pid:
        api.PyOS_AfterFork_Parent()
    else:
        api.PyOS_AfterFork_Child()
    return pid


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


def own_folder(work: str) -> dict[str, str]:
    """What a session's environment says about its folder."""
    return {"HOME": work, "TMPDIR": work}


def exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def report(error: BaseException) -> None:
    """The traceback on stderr, without our own frames."""
    try:
        shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
        assert shown is not None
        lines = shown
        while shown is not None:
            shown.stack[:] = [frame for frame in shown.stack if frame.filename != __file__]
            shown = shown.__cause__ or shown.__context__
        sys.stderr.write("".join(lines.format()))
        flush()
    except BaseException:
        os.write(2, f"{type(error).__name__} (it could not be shown)\n".encode())


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


# ---------------------------------------------------------------------------------------------- processes


class Exits:
    """Where the kernel has no pidfd_open (gVisor's): a pipe that gets a byte whenever some child has ended."""

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
        """In a child: the pipe is not its own."""
        if cls.pipe is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    @classmethod
    def open(cls, pid: int) -> int:
        """A descriptor of our own that is readable once this child has ended, or only may have."""
        return os.pidfd_open(pid) if cls.pipe is None else os.dup(cls.pipe[0])

    @classmethod
    def clear(cls) -> None:
        if cls.pipe is not None:
            try:
                while os.read(cls.pipe[0], 4096):
                    pass
            except BlockingIOError:
                pass


class Child:
    """A process that the supervisor forked, and the supervisor's ends of its pipes."""

    def __init__(self, pid: int, out: int, err: int, end: socket.socket | None, host: int) -> None:
        self.pid, self.out, self.err = pid, out, err
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        self.channel = None if end is None else Channel(end, pid)
        self.exit = Exits.open(pid)
        self.urgent, self.all = select.poll(), select.poll()
        said = [] if self.channel is None else [self.channel.fd]
        for fd in (*said, host, self.exit):  # The channel comes first: an answer counts before an exit.
            self.urgent.register(fd, select.POLLIN)
        for fd in (*said, out, err, host, self.exit):
            self.all.register(fd, select.POLLIN)

    def close(self) -> None:
        for fd in (self.exit, self.out, self.err):
            os.close(fd)
        if self.channel is not None:
            self.channel.close()

    def deafen(self, fd: int) -> None:
        """Hear no more of a descriptor whose other end is closed."""
        for poll in (self.urgent, self.all):
            try:
                poll.unregister(fd)
            except KeyError:
                continue

    def ended(self) -> bool:
        """Whether it has ended, reaped or not."""
        Exits.clear()
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def ends(self, deadline: float) -> bool:
        """Whether it ends before the deadline."""
        while not self.ended():
            try:
                wait(self.exit, select.POLLIN, deadline)
            except TimeoutError:
                return False
        return True

    def exited(self) -> int:
        """Reap it, once it has ended; its exit code, or minus its signal."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return -signal.SIGKILL  # Reaped among the leftovers of an earlier call.


def fork(patience_s: float) -> int:
    """os.fork, tried again while the box is full of processes: a control group counts the dead a little longer."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.002)


def start(
    run: Callable[[], object],
    work: str,
    limits: dict[str, int],
    patience_s: float,
    host: int,
    *,
    channel: bool,
    sealed: bool,
) -> Child:
    """Fork a process with pipes of its own that holds nothing of the host's wire, and `run` in it."""
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    ends = channel_pair() if channel else None
    try:
        pid = fork(patience_s)
    except OSError:
        for fd in (out, out_end, err, err_end):
            os.close(fd)
        for end in ends or ():
            end.close()
        raise
    if pid == 0:
        try:
            enter(out_end, err_end, ends and ends[1].fileno(), work, limits, sealed=sealed)
            run()
        finally:
            os._exit(CHANNEL_LOST)
    os.close(out_end)
    os.close(err_end)
    if ends is not None:
        ends[1].close()
    return Child(pid, out, err, ends and ends[0], host)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end, which the kernel tells who writes, and the worker's."""
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
    """Every descriptor that this process holds, whatever its limit of open files is."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # The listing's own.
        found.append(int(name))
    return found


def keep_only(allowed: set[int]) -> None:
    """Close every descriptor but the lowest ones, which are `allowed`; SystemExit where another one is left.

    A descriptor of the host's wire in a worker would let its code forge answers: so it is proved, not assumed.
    """
    close_from(max(allowed) + 1)
    left = sorted(set(open_descriptors()) - allowed)
    if left:
        os.write(2, f"descriptors {left} are open that no worker may hold\n".encode())
        raise SystemExit(CHANNEL_LOST)


def enter(out: int, err: int, channel: int | None, work: str, limits: dict[str, int], *, sealed: bool) -> None:
    """Become a child: own session, own pipes, limits; every descriptor of the supervisor closed."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    if channel is not None:
        os.dup2(channel, CHANNEL, inheritable=False)
    keep_only({0, 1, 2} if channel is None else {0, 1, 2, CHANNEL})
    Exits.forget()
    for number in QUIET:
        signal.signal(number, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    write_text("/proc/self/oom_score_adj", "1000")
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


def deny_queues() -> None:
    """Take mq_open away: a kernel that lists no queues (gVisor's) leaves none that a reset could remove."""
    load_number, jump_if_equal, leave = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | errno.ENOSYS, 0x7FFF0000
    steps = [(load_number, 0, 0, 0), (jump_if_equal, 0, 1, SYS_MQ_OPEN), (leave, 0, 0, refuse), (leave, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter for system calls")


def write_text(path: str, text: str) -> None:
    """Write where the kernel lets us."""
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(fd, text.encode())
    except OSError:
        pass
    finally:
        os.close(fd)


def children(pid: int) -> list[int]:
    """The living children and unreaped zombies of a process, over all its threads."""
    if not LISTS_CHILDREN:
        return [child for child, parent in parents().items() if parent == pid]
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def parents() -> dict[int, int]:
    """Every process here with its parent, for a kernel that lists no children (gVisor's)."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def descendants(root: int) -> dict[int, int]:
    """Every process below `root`, with its parent, parents first. As a subreaper we keep orphans, so none can hide."""
    tree: dict[int, int] = {}
    snapshot = None if LISTS_CHILDREN else parents()
    queue = [root]
    for parent in queue:
        below = children(parent) if snapshot is None else [pid for pid, above in snapshot.items() if above == parent]
        for pid in below:
            if pid not in tree:
                tree[pid] = parent
                queue.append(pid)
    return tree


def unix_session(pid: int) -> int:
    """The id of the process that called setsid; 0 where the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def send_signal(pid: int, parent: int, number: int) -> None:
    """Signal a process that is still the child of `parent`: a number taken over by a stranger is spared."""
    try:
        if Exits.pipe is not None:
            if pid in children(parent):
                os.kill(pid, number)
            return
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if pid in children(parent):
            signal.pidfd_send_signal(fd, number)
    except OSError:
        pass
    finally:
        os.close(fd)


def reap() -> None:
    """Collect what has ended, without waiting."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_all_but(spare: set[int]) -> bool:
    """Kill our descendants outside `spare`; whether none is left."""
    me = os.getpid()
    end = time.monotonic() + KILL_S
    while True:
        reap()
        victims = {pid: parent for pid, parent in descendants(me).items() if pid not in spare}
        if not victims:
            return True
        if time.monotonic() > end:
            return False
        for pid, parent in victims.items():
            send_signal(pid, parent, signal.SIGKILL)
        mine = [pid for pid, parent in victims.items() if parent == me]
        for pid in mine:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue
        if not mine:
            time.sleep(0.0005)


def kill_all() -> bool:
    """Kill everything below us; whether nothing is left."""
    if not ALONE:
        return kill_all_but(set())
    try:
        os.kill(-1, signal.SIGKILL)  # One call: no fork can slip through.
    except ProcessLookupError:
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return not children(os.getpid())


def go_on(stopped: dict[int, int]) -> None:
    for pid, parent in stopped.items():
        send_signal(pid, parent, signal.SIGCONT)


def stop_all() -> dict[int, int]:
    """Stop everything below us; the stopped processes."""
    if ALONE:
        try:
            os.kill(-1, signal.SIGSTOP)
        except ProcessLookupError:
            pass
        return descendants(os.getpid())
    stopped: dict[int, int] = {}
    while True:
        tree = descendants(os.getpid())
        if tree.keys() <= stopped.keys():
            return tree
        for pid in tree.keys() - stopped.keys():
            send_signal(pid, tree[pid], signal.SIGSTOP)
        stopped.update(tree)


# ---------------------------------------------------------------------------------------------- a call


class Capture:
    """The head and the tail of a stream, however long it is."""

    def __init__(self) -> None:
        # Views, because assigning a view to a slice of a bytearray makes a copy that nobody zeroes.
        self.head, self.tail = memoryview(bytearray(KEEP)), memoryview(bytearray(KEEP))
        self.total = 0

    def read(self, fd: int) -> int:
        """Take what one read gives; 0 at the end of the stream, BlockingIOError when there is nothing yet."""
        count = os.readv(fd, [SCRATCH])
        view = SCRATCH[:count]
        room = max(0, KEEP - self.total)
        self.head[self.total : self.total + len(view[:room])] = view[:room]
        rest = view[room:]
        if rest:
            at = max(0, self.total - KEEP) % KEEP
            first = rest[: KEEP - at]
            self.tail[at : at + len(first)] = first
            self.tail[: len(rest) - len(first)] = rest[len(first) :]
        self.total += count
        view[:] = ZEROS[:count]
        return count

    @property
    def cut(self) -> bool:
        return self.total > 2 * KEEP

    def parts(self) -> list[bytes | bytearray | memoryview]:
        """What was kept, in order, with the cut named in the middle."""
        if not self.cut:
            return [self.head[: self.total], self.tail[: max(0, self.total - KEEP)]]
        at = (self.total - KEEP) % KEEP
        note = f"\n[... {self.total - 2 * KEEP} bytes cut ...]\n".encode()
        return [self.head, note, self.tail[at:], self.tail[:at]]

    def clear(self) -> None:
        used = min(self.total, KEEP)
        self.head[:used] = ZEROS[:used]
        if self.total > KEEP:
            self.tail[:] = ZEROS
        self.total = 0


SCRATCH = memoryview(bytearray(KEEP))
OUT, ERR = Capture(), Capture()


class Call:
    """One program under a limit: drains its output, carries its questions to the host, says how it ended."""

    def __init__(self, host: Wire, child: Child, envelope: dict[str, Any]) -> None:
        self.host, self.child = host, child
        self.id: int = envelope["id"]
        self.began = time.monotonic()
        self.deadline = self.began + envelope["timeout_s"]
        self.status = ""
        self.exit_code = 0
        self.lost = False
        self.interrupted = False
        self.asks = 0

    def run(self) -> None:
        """Return when it has ended, by itself or not; nothing is killed yet."""
        poll, later = self.child.urgent, self.began + OUTPUT_LATER_S
        while not self.status:
            now = time.monotonic()
            if now >= later:
                poll, later = self.child.all, self.deadline
            if now >= self.deadline:
                self.expire()
            elif self.host.pending:
                self.hear_host()
            else:
                self.hear(poll.poll((later - now) * 1000))
        self.drain_all()

    def hear(self, events: list[tuple[int, int]]) -> None:
        child = self.child
        for fd, _ in events:
            if self.status:
                return
            if child.channel is not None and fd == child.channel.fd:
                self.hear_worker(child.channel)
            elif fd == child.out:
                self.drain(fd, OUT)
            elif fd == child.err:
                self.drain(fd, ERR)
            elif fd == child.exit:
                if child.ended():
                    self.hear_exit()
            else:
                self.hear_host()

    def drain_all(self) -> None:
        """Take what the call left in its pipes."""
        waiting = {fd for fd, _ in self.child.all.poll(0)}
        for fd, capture in ((self.child.out, OUT), (self.child.err, ERR)):
            while fd in waiting and self.drain(fd, capture):
                pass

    def end(self, status: str, exit_code: int, *, lost: bool = False) -> None:
        self.status, self.exit_code, self.lost = status, exit_code, lost

    def expire(self) -> None:
        """At the limit a cell is interrupted, to keep its state; a shell, and a cell that goes on, are killed."""
        if self.child.channel is None or self.interrupted:
            self.end("timeout", -signal.SIGKILL, lost=True)
            return
        self.interrupted = True
        self.deadline += GRACE_S
        os.kill(self.child.pid, signal.SIGINT)

    def drain(self, fd: int, capture: Capture) -> bool:
        """Whether there may be more; over the hard limit the call ends."""
        try:
            count = capture.read(fd)
        except BlockingIOError:
            return False
        if count == 0:
            self.child.deafen(fd)
            return False
        if OUT.total + ERR.total <= HARD_OUTPUT:
            return count == len(SCRATCH)
        if self.status in ("", "ok", "error"):
            self.end("output_limit", -signal.SIGKILL, lost=True)
        return False

    def hear_worker(self, channel: Channel) -> None:
        soon = time.monotonic() + PATIENCE_S
        try:
            envelope, body = channel.read(soon)
        except EOFError:
            self.child.deafen(channel.fd)
            self.closed_channel(soon)
            return
        except (Broken, OSError):
            self.end("protocol", -signal.SIGKILL, lost=True)
            return
        if envelope.get("id") == self.id and type(envelope.get("done")) is int and not body:
            self.answered(envelope["done"])
        elif envelope.get("id") == self.id and type(envelope.get("ask")) is int and self.asks < MAX_ASKS:
            self.asks += 1
            self.host.write({"id": self.id, "ask": envelope["ask"]}, [body])
        else:
            self.end("protocol", -signal.SIGKILL, lost=True)
        zero(body)

    def closed_channel(self, soon: float) -> None:
        """The worker is ending, or the code closed the channel under it."""
        if self.child.ends(soon):
            self.hear_exit()
        else:
            self.end("protocol", -signal.SIGKILL, lost=True)

    def answered(self, code: int) -> None:
        if self.interrupted:
            self.end("timeout", -signal.SIGINT)
        else:
            self.end("error" if code else "ok", code & 0xFF)

    def hear_exit(self) -> None:
        code = self.child.exited()
        worker = self.child.channel is not None
        if self.interrupted:
            self.end("timeout", -signal.SIGINT, lost=True)
        elif code < 0:
            self.end("killed", code, lost=worker)
        elif worker and code == CHANNEL_LOST:
            self.end("protocol", code, lost=True)
        elif worker:
            self.end("error", code or 1, lost=True)  # It left without an answer: never a success.
        else:
            self.end("error" if code else "ok", code)

    def hear_host(self) -> None:
        envelope, body = self.host.read(None)
        if envelope.get("id") != self.id:
            return
        if envelope.get("op") == "cancel":
            self.end("killed", -signal.SIGKILL, lost=True)
        elif self.child.channel is not None and not self.interrupted:
            try:
                self.child.channel.write({"answer": envelope["answer"]}, [body])
            except OSError:
                self.end("protocol", -signal.SIGKILL, lost=True)
        zero(body)

    def answer(self) -> tuple[dict[str, Any], list[bytes | bytearray | memoryview]]:
        out, err = OUT.parts(), ERR.parts()
        return {
            "status": self.status,
            "exit_code": self.exit_code,
            "state_lost": self.lost,
            "truncated": OUT.cut or ERR.cut,
            "seconds": round(time.monotonic() - self.began, 6),
            "stdout": sum(map(len, out)),
            "stderr": sum(map(len, err)),
        }, out + err


class OomCounter:
    """How many processes of this box the kernel has killed for want of memory; always 0 without a cgroup."""

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


# ---------------------------------------------------------------------------------------------- files


def parts_of(path: str, work: str) -> list[str]:
    """The names below the working folder that lead to `path`; Refused where it leads out."""
    if path.startswith("/"):
        if path != work and not path.startswith(work.rstrip("/") + "/"):
            raise Refused(f"{path!r} is outside of the working folder {work}")
        path = path[len(work) :]
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise Refused(f"{path!r} is outside of the working folder {work}")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise Refused(f"{path!r} is no path: it holds half of a character") from None
    return parts


def open_below(work: str, parts: list[str], *, make: bool = False) -> int:
    """A descriptor of the folder, following no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    fd = os.open(work, flags)
    for part in parts:
        if make:
            try:
                os.mkdir(part, 0o755, dir_fd=fd)
            except FileExistsError:
                pass
        try:
            inner = os.open(part, flags, dir_fd=fd)
            # gVisor's kernel follows a link here all the same: what was opened must be what has that name.
            if not os.path.samestat(os.fstat(inner), os.stat(part, dir_fd=fd, follow_symlinks=False)):
                os.close(inner)
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        finally:
            os.close(fd)
        fd = inner
    return fd


def open_file(work: str, path: str, flags: int) -> int:
    """A descriptor of a regular file; Refused for links, pipes and devices."""
    parts = parts_of(path, work)
    if not parts:
        raise Refused(f"{path!r} is a folder")
    folder = open_below(work, parts[:-1], make=bool(flags & os.O_CREAT))
    try:
        # O_NONBLOCK: a pipe left under this name must not hold up the supervisor.
        fd = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFile(f"{path!r} is a link") from None
        raise
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFile(f"{path!r} is not a file")
    return fd


def write_file(work: str, path: str, data: memoryview, *, executable: bool) -> None:
    fd = open_file(work, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(fd, [data], None)
        if executable:
            os.fchmod(fd, 0o755)
    finally:
        os.close(fd)


def read_file(work: str, path: str, limit: int) -> tuple[bytearray, bool]:
    """The content, and whether it may be executed."""
    fd = open_file(work, path, os.O_RDONLY)
    try:
        info = os.fstat(fd)
        size = info.st_size
        if size > limit:
            raise Refused(f"{path!r} has {size} bytes, the limit is {limit}")
        data = bytearray(size)
        if size:
            del data[os.readv(fd, [data]) :]
        return data, bool(info.st_mode & stat.S_IXUSR)
    finally:
        os.close(fd)


def list_folder(work: str, path: str) -> list[bytes]:
    fd = open_below(work, parts_of(path, work))
    try:
        with os.scandir(fd) as entries:
            return sorted(
                os.fsencode(entry.name) + (b"/" if entry.is_dir(follow_symlinks=False) else b"") for entry in entries
            )
    finally:
        os.close(fd)


def copy_folder(source: int, target: int, depth: int = 0) -> None:
    """Copy files, folders and links, with modes and times; no link is followed, pipes and sockets are left out."""
    if depth > MAX_DEPTH:
        raise Refused(f"it is over {MAX_DEPTH} folders deep")
    for name in os.listdir(source):
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode):
            copy_entry(source, target, name, info, depth)


def copy_entry(source: int, target: int, name: str, info: os.stat_result, depth: int) -> None:
    """One file or folder, whatever its mode."""
    is_folder = stat.S_ISDIR(info.st_mode)
    mode = stat.S_IMODE(info.st_mode)
    if not mode & stat.S_IRUSR:
        os.chmod(name, mode | stat.S_IRWXU, dir_fd=source)
    flags = os.O_NOFOLLOW | (os.O_DIRECTORY if is_folder else os.O_NONBLOCK)
    old = os.open(name, os.O_RDONLY | flags, dir_fd=source)
    if is_folder:
        os.mkdir(name, 0o700, dir_fd=target)
        new = os.open(name, os.O_RDONLY | flags, dir_fd=target)
        copy_folder(old, new, depth + 1)
    else:
        new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600, dir_fd=target)
        while os.sendfile(new, old, None, 1 << 24):
            pass
    for fd in (old, new):
        os.fchmod(fd, mode)
    os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.close(old)
    os.close(new)


def remove_folder(path: str) -> None:
    empty_folder(path)
    os.rmdir(path)


def open_to_empty(name: str, folder: int) -> int:
    """A descriptor of a sub-folder that may be emptied, whatever its mode was; follows no link."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
    finally:
        os.close(handle)


def remove_file(name: str, folder: int) -> bool:
    """Whether it was one, and is gone."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def empty_folder(path: str) -> None:
    """Remove everything below `path`: any depth, any mode, no link followed.

    Each sub-folder's folders are lifted to the top before it is removed, so no path ever grows long. Their names
    there begin with random digits: code in the box cannot have put something in their way.
    """
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    unique, lifted = os.urandom(16).hex(), 0
    try:
        while names := os.listdir(top):
            for name in names:
                if remove_file(name, top):
                    continue
                folder = open_to_empty(name, top)
                try:
                    for inner in os.listdir(folder):
                        if not remove_file(inner, folder):
                            os.close(open_to_empty(inner, folder))
                            lifted += 1
                            os.rename(inner, f"{unique}-{lifted}", src_dir_fd=folder, dst_dir_fd=top)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def empty_ipc() -> None:
    """Remove the System V objects of our namespace."""
    kinds: dict[str, tuple[Callable[[], int], Callable[[int], object]]] = {
        "shm": (lambda: libc.shmget(0, 1, 0o600), lambda number: libc.shmctl(number, IPC_RMID, None)),
        "msg": (lambda: libc.msgget(0, 0o600), lambda number: libc.msgctl(number, IPC_RMID, None)),
        "sem": (lambda: libc.semget(0, 1, 0o600), lambda number: libc.semctl(number, 0, IPC_RMID)),
    }
    for kind, (make, remove) in kinds.items():
        for number in ipc_numbers(kind, make):
            remove(number)


IPC_SEEN: dict[str, int] = {}
"""The highest number of each kind that was removed, where none are listed."""


def ipc_numbers(kind: str, make: Callable[[], int]) -> Iterable[int]:
    """The numbers of all System V objects of a kind; gVisor's kernel lists none, but counts up: all up to a new one."""
    try:
        with open(f"/proc/sysvipc/{kind}", "rb") as file:
            return [int(row.split()[1]) for row in file.read().splitlines()[1:]]
    except OSError:
        first = IPC_SEEN.get(kind, 0)
        newest = make()
        IPC_SEEN[kind] = newest if newest >= 0 else first + MAX_IPC
        return range(first, IPC_SEEN[kind] + 1)


# ---------------------------------------------------------------------------------------------- supervisor


class Session:
    """A Python session: its worker, its working folder, and the processes that it is known to have started."""

    def __init__(self, worker: Child, work: str, *, lost: bool = False) -> None:
        self.worker, self.work = worker, work
        self.lost = lost
        """Its state was lost, and no answer has said so yet."""
        self.started: set[int] = set()

    def own(self, tree: dict[int, int]) -> set[int]:
        """Of the processes in `tree`, the worker and what it started; a daemon keeps its dead parent's Unix session."""
        known = {self.worker.pid, *self.started}
        for pid, parent in tree.items():  # Parents come before their children.
            if parent in known or unix_session(pid) in known:
                known.add(pid)
        return known.intersection(tree)

    def take_loss(self) -> bool:
        lost, self.lost = self.lost, False
        return lost


class Supervisor:
    """Answers the host's calls one by one; the only process here that the host listens to."""

    def __init__(self, host: Wire, config: dict[str, Any]) -> None:
        self.host = host
        self.work: str = config["work"]
        self.branches: str = config["branches"]
        self.wipe: list[str] = [path for path in config["wipe"] if os.path.isdir(path)]
        self.limits: dict[str, int] = config["limits"]
        self.shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        self.modes = {path: stat.S_IMODE(os.stat(path).st_mode) for path in self.wipe}
        self.oom = OomCounter()
        self.sessions = {TRUNK: Session(self.new_worker(self.work), self.work)}
        self.operations = {
            "python": self.python,
            "exec": self.exec,
            "write": self.write,
            "read": self.read,
            "list": self.list,
            "fork": self.fork,
            "end": self.end,
            "reset": self.reset,
        }

    def serve(self) -> None:
        """Answer until the wire closes."""
        self.host.write({"hello": PROTOCOL, "python": sys.version.split()[0]})
        while True:
            envelope, body = self.host.read(None)
            operation = self.operations.get(envelope.get("op", ""))
            if operation is not None:  # Else an answer or a cancel that crossed the end of its call.
                answer, parts = self.attempt(operation, envelope, body)
                self.host.write({"id": envelope["id"], **answer}, parts)
                for part in parts:
                    if type(part) is bytearray:
                        zero(part)
            zero(body)
            OUT.clear()
            ERR.clear()
            reap()

    def attempt(self, operation: Callable[..., Any], envelope: dict[str, Any], body: bytearray) -> Any:
        session = self.sessions.get(envelope.get("session", TRUNK))
        if session is None:
            return {"gone": True}, []
        try:
            return operation(session, envelope, body)
        except Refused as error:
            return {"error": str(error), "not_a_file": isinstance(error, NotAFile)}, []
        except OSError as error:
            return {"error": error.strerror or str(error), "errno": error.errno}, []
        except ValueError as error:
            return {"error": str(error)}, []

    # Sessions

    def new_worker(self, work: str, patience_s: float = KILL_S, *, fresh: bool = False) -> Child:
        def run() -> None:
            gc.enable()
            Worker(work, shadowing=not fresh).serve()

        return start(run, work, self.limits, patience_s, self.host.fd, channel=True, sealed=fresh)

    def renew(self, session: Session) -> None:
        """A new worker for a session whose processes are gone."""
        session.worker.close()
        session.started.clear()
        session.lost = True
        try:
            session.worker = self.new_worker(session.work)
        except OSError as error:
            raise SystemExit(1) from error  # Without a session there is no box: the host starts another.

    def restart(self, session: Session) -> None:
        """Kill a session with all it started, and begin it anew; the others go on where that is possible."""
        if len(self.sessions) > 1 and self.kill(session):
            self.renew(session)
        else:
            self.restart_all()

    def restart_all(self) -> None:
        kill_all()
        for session in self.sessions.values():
            self.renew(session)

    def kill(self, session: Session) -> bool:
        """Kill what belongs to one session, and nothing else; whether nothing of it is left."""
        tree = stop_all()  # Nothing can fork while we look.
        own = session.own(tree)
        others = {pid: parent for pid, parent in tree.items() if pid not in own}
        gone = kill_all_but(set(others))
        go_on(others)
        return gone

    def claim(self, session: Session) -> None:
        """Note what each session started; a stranger without a parent is put down to the one that was called last.

        A process is known by its session before it loses its parent, and stays known afterwards.
        """
        if len(self.sessions) == 1:
            return
        reap()
        tree = descendants(os.getpid())
        strays = set(tree)
        for each in self.sessions.values():
            each.started |= each.own(tree)
            strays -= each.started
        session.started |= strays

    def revive(self, session: Session) -> None:
        """Begin the session anew where it ended, or wrote to its channel, between two calls.

        Its output of that time is dropped: an answer holds its own call's output only.
        """
        worker = session.worker
        assert worker.channel is not None
        ready = {fd for fd, _ in worker.all.poll(0)}
        if worker.channel.pending or worker.channel.fd in ready or worker.ended():
            self.restart(session)
            return
        for fd in ready.intersection((worker.out, worker.err)):
            self.discard(fd)

    def make_room(self, start: Callable[[float], Child]) -> Child:
        """Fork; where the box is full of processes they are killed first, and every session is lost."""
        try:
            return start(0.0)
        except BlockingIOError:
            self.restart_all()
            return start(KILL_S)

    # Programs

    def python(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a cell in the session, or in a worker that earlier code never touched."""
        if envelope["fresh"]:
            return self.python_fresh(session, envelope, body)
        self.revive(session)
        call = self.cell(session.worker, envelope, body)
        if call.lost:
            self.restart(session)
        else:
            self.claim(session)
        call.lost |= session.take_loss()
        return call.answer()

    def python_fresh(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Everything else in the box is stopped meanwhile, and goes on afterwards."""
        bystanders = stop_all()
        worker = self.make_room(lambda patience_s: self.new_worker(session.work, patience_s, fresh=True))
        call = self.cell(worker, envelope, body)
        worker.close()
        if not kill_all_but(self.bystanders(bystanders)):
            self.restart_all()
        go_on(bystanders)
        call.lost = session.take_loss()
        return call.answer()

    def bystanders(self, before: Iterable[int]) -> set[int]:
        """What was there before a call, and the sessions: they may have been started anew during it."""
        return {*before, *(session.worker.pid for session in self.sessions.values())}

    def cell(self, worker: Child, envelope: dict[str, Any], body: bytearray) -> Call:
        assert worker.channel is not None
        killed = self.oom.read()
        call = Call(self.host, worker, envelope)
        try:
            worker.channel.write({"id": call.id, "functions": envelope["functions"]}, [body])
        except OSError:
            call.end("protocol", -signal.SIGKILL, lost=True)
        zero(body)  # Before any fork that follows the call.
        call.run()
        self.note_oom(call, killed)
        return call

    def discard(self, fd: int) -> None:
        """Drop what lies in a pipe."""
        try:
            for _ in range(64):
                count = os.readv(fd, [SCRATCH])
                SCRATCH[:count] = ZEROS[:count]
                if not count:
                    return
        except BlockingIOError:
            return

    def note_oom(self, call: Call, before: int) -> None:
        if call.status in ("error", "killed") and self.oom.read() > before:
            call.status = "oom"

    def exec(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a shell command; what it started ends with the call."""

        def run() -> None:
            try:
                command = [self.shell.encode(), b"-c", bytes(body)]
                os.execve(self.shell, command, {**os.environ, **own_folder(session.work)})
            except (OSError, ValueError) as error:
                os.write(2, f"the shell cannot start: {error}\n".encode())
                os._exit(126)

        before = set(descendants(os.getpid()))
        killed = self.oom.read()

        def fork_shell(patience_s: float) -> Child:
            return start(run, session.work, self.limits, patience_s, self.host.fd, channel=False, sealed=False)

        child = self.make_room(fork_shell)
        call = Call(self.host, child, envelope)
        call.run()
        child.close()
        self.note_oom(call, killed)
        spared = self.bystanders(before)
        for pid in self.workers():
            spared.update(descendants(pid))
        if not kill_all_but(spared):
            self.restart_all()
        call.lost = session.take_loss()
        return call.answer()

    # Files

    def write(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        at = 0
        for path, size, executable in envelope["files"]:
            write_file(session.work, path, memoryview(body)[at : at + size], executable=executable)
            at += size
        return {}, []

    def read(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        data, executable = read_file(session.work, envelope["path"], envelope["limit"])
        return {"executable": executable}, [data]

    def list(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        names = b"\0".join(list_folder(session.work, envelope["path"]))
        if len(names) > MAX_BODY:
            raise Refused(f"{envelope['path']!r} holds too many names")
        return {}, [names]

    # Branches

    def fork(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        """A session that goes on from where this one stands, with a copy of its folder."""
        if len(self.sessions) > MAX_BRANCHES:
            raise Refused(f"over {MAX_BRANCHES} branches")
        self.revive(session)
        session.started = set(descendants(os.getpid())) if len(self.sessions) == 1 else session.started
        folder = os.path.join(self.branches, str(envelope["branch"]))
        os.mkdir(folder)
        try:
            self.copy(session.work, folder, envelope)
            worker = self.split(session.worker, folder)
        except BaseException:
            remove_folder(folder)
            raise
        self.sessions[envelope["branch"]] = Session(worker, folder, lost=session.lost)
        return {}, []

    def copy(self, source: str, target: str, envelope: dict[str, Any]) -> None:
        """Copy a working folder in a process under a limit, while everything else is stopped."""
        if not os.listdir(source):
            return

        def run() -> None:
            try:
                copy_folder(os.open(source, os.O_RDONLY | os.O_DIRECTORY), os.open(target, os.O_RDONLY))
            except (OSError, Refused) as error:
                os.write(2, str(error).encode())
                os._exit(1)
            os._exit(0)

        bystanders = stop_all()
        try:
            child = start(run, source, self.limits, 0.0, self.host.fd, channel=False, sealed=True)
            call = Call(self.host, child, envelope)
            call.run()
            child.close()
            kill_all_but(self.bystanders(bystanders))
        finally:
            go_on(bystanders)
        if call.status != "ok":
            said = b"".join(map(bytes, ERR.parts())).decode("utf-8", "replace")
            raise Refused(f"the working folder cannot be copied: {said or call.status}")

    def split(self, worker: Child, folder: str) -> Child:
        """Have a worker fork: it gets the ends of new pipes, and its child's first byte carries the child's id.

        The kernel writes that id. Whatever process of the session it is, from now on it is the branch.
        """
        assert worker.channel is not None
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        ours, theirs = channel_pair()
        try:
            worker.channel.write({"fork": folder})
            socket.send_fds(worker.channel.end, [b"\0"], [theirs.fileno(), out_end, err_end])
            theirs.close()
            wait(ours.fileno(), select.POLLIN, time.monotonic() + FORK_S)
            said, credentials, _, _ = ours.recvmsg(1, CREDENTIALS)
            pid = CREDENTIAL.unpack(credentials[0][2])[0] if said else 0
            if pid not in children(os.getpid()) or pid in self.workers():
                raise Refused("the session could not be forked: no process or no memory is left")
            return Child(pid, out, err, ours, self.host.fd)
        except BaseException as error:
            ours.close()
            os.close(out)
            os.close(err)
            if isinstance(error, OSError):
                raise Refused("the session could not be forked: it does not answer") from error
            raise
        finally:
            theirs.close()
            os.close(out_end)
            os.close(err_end)

    def workers(self) -> set[int]:
        return self.bystanders(())

    def end(self, _session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        """End a branch: its processes and its files."""
        session = self.sessions.pop(envelope["branch"], None)
        if session is not None:
            if not self.kill(session):
                self.restart_all()
            session.worker.close()
            self.remove(session.work)
        return {}, []

    def remove(self, folder: str) -> None:
        """Remove a branch's folder while everything else is stopped: other sessions could write into it meanwhile.

        What cannot be removed is left for the next reset, which verifies that nothing is left.
        """
        bystanders = stop_all()
        try:
            remove_folder(folder)
        except OSError:
            pass
        finally:
            go_on(bystanders)

    # Episodes

    def reset(self, _session: Session, _envelope: dict[str, Any], _body: bytearray) -> Any:
        """Nothing of before is left, or `clean` is false; then no session is left either."""
        try:
            clean = self.begin_anew()
        except Exception as error:
            self.sessions = {}
            return {"clean": False, "why": f"{type(error).__name__}: {error}"[:500]}, []
        return {"clean": clean}, []

    def begin_anew(self) -> bool:
        """End every session, remove every file and begin a new trunk; whether nothing else is left."""
        for session in self.sessions.values():
            session.worker.close()
        clean = kill_all()
        for path in self.wipe:
            self.empty(path)
        if ALONE:
            empty_ipc()
        clean = clean and not any(os.listdir(path) for path in self.wipe)
        trunk = Session(self.new_worker(self.work), self.work)
        self.sessions = {TRUNK: trunk}
        return clean and children(os.getpid()) == [trunk.worker.pid]

    def empty(self, path: str) -> None:
        try:
            if stat.S_IMODE(os.lstat(path).st_mode) != self.modes[path]:
                os.chmod(path, self.modes[path])
        except FileNotFoundError:
            os.mkdir(path, self.modes[path])
        for mark in os.listxattr(path):
            os.removexattr(path, mark)
        empty_folder(path)
        os.utime(path)

    def leave(self) -> None:
        """End everything below us; as pid 1 the kernel does it."""
        if not ALONE:
            kill_all()
            for path in self.wipe:
                remove_folder(path)


# Ignored, not handled: a handler would make pid 1 open to signals from inside.
QUIET = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})


def connect(config: dict[str, Any]) -> Wire:
    """The host's wire, on the lowest descriptors: inherited, connected to once, or our own input and output."""
    if "fd" in config:
        ends = [int(config["fd"])]
    elif "connect" in config:
        socket_ = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        socket_.connect(config["connect"])
        ends = [socket_.detach()]
    else:
        ends = [0, 1]
    # Above the low ones first: an end may have the number that another one is to get.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, WIRE_OUT + 1) for fd in ends]
    held = [WIRE_IN, WIRE_OUT][: len(ends)]
    for copy, fd in zip(copies, held):
        os.dup2(copy, fd, inheritable=False)
        os.set_blocking(fd, True)
    close_from(held[-1] + 1)
    return Wire(held[0], held[-1])


def prepare() -> None:
    """Make this process a zygote that its children cannot reach into."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    for number in QUIET:
        signal.signal(number, signal.SIG_IGN)
    Exits.watch()
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    sys.argv[:] = [""]
    sys.path[:] = [path for path in sys.path if path and path != os.path.dirname(os.path.abspath(__file__))]
    # Found by path and not by `site.main`: no .pth file and no sitecustomize runs.
    sys.path += [path for path in site.getsitepackages() if path not in sys.path and os.path.isdir(path)]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    gc.collect()
    gc.freeze()
    gc.disable()


def main() -> NoReturn:
    config = json.loads(sys.argv[1])
    if not ALONE:
        for path in config["wipe"]:
            if not os.path.basename(path).startswith("agentgym-"):
                raise SystemExit(f"{path!r} is not a folder of ours to wipe")
    host = connect(config)
    prepare()
    os.chdir("/")
    supervisor = Supervisor(host, config)
    try:
        supervisor.serve()
    except (EOFError, BrokenPipeError):
        pass  # The host is gone.
    finally:
        try:
            supervisor.leave()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
