"""What hostile code does to a box, as data: five groups, each payload with the statuses that it may report.

An attack prints ESCAPED, and what it reached, where it succeeds; `test_hostile` holds that none of them does.
"""

from dataclasses import dataclass, field
from typing import Literal

from agentgym.types import Status

Group = Literal["exhaustion", "escape", "forgery", "persistence", "files"]
ISOLATED = frozenset({"bubblewrap", "docker", "runsc"})
"""The kinds of box that hold against intent."""
ANYWHERE = ISOLATED | {"unsafe"}
BUT_GVISOR = frozenset({"unsafe", "bubblewrap", "docker"})
"""Where gVisor's kernel ends the whole box, or lets code in it touch process 1: see sandbox/README.md."""
ENDED: tuple[Status, ...] = ("ok", "error")
"""How a program may end that was left alone."""


@dataclass(frozen=True, kw_only=True)
class FileCall:
    """A file call of the host, made after the code has run; it raises one of `raises`, or returns."""

    op: Literal["read", "write", "list"]
    path: str
    raises: tuple[type[Exception], ...] = ()
    match: str = ""
    may_return: bool = False
    """Whether it may return as well, as where the box changes the file meanwhile."""
    content: bytes = b"x"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Code, and what is right for it. CANARY in the code stands for a file of the host."""

    name: str
    group: Group
    code: str = ""
    right: tuple[Status, ...]
    lost: bool | None = None
    """Whether the session is lost; None where either is right."""
    following: tuple[Status, ...] = ("ok",)
    """What the next cell may report: a session that lied about its end may cost the next one, and no more."""
    honest: bool = True
    """Whether the session's own answers can still be right after it: it may lie about itself, and only that."""
    shell: bool = False
    timeout_s: float = 10.0
    functions: bool = False
    """Whether a host function `f` is offered."""
    calls: tuple[FileCall, ...] = field(default=())
    kinds: frozenset[str] = ANYWHERE


# ---------------------------------------------------------------------------------------------- what attacks share

FRAMES = """
import json, os, struct, sys, threading, time
def frame(envelope, body=b""):
    if body: envelope = {**envelope, "body": len(body)}
    head = envelope if isinstance(envelope, bytes) else json.dumps(envelope).encode()
    return struct.pack(">I", len(head)) + head + body
def worker():
    here = sys._getframe()
    while type(here.f_locals.get("self")).__name__ != "Worker": here = here.f_back
    return here.f_locals["self"]
call = worker().call
"""
"""`frame` makes one, `worker()` is the one that runs this cell, `call` is the call's id."""

SYSCALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def reaches(name, number, *args):
    ctypes.set_errno(0)
    got = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *args)))
    if got >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOSPC):
        print("ESCAPED", name, got, errno.errorcode.get(ctypes.get_errno()))
"""
"""`reaches` tells when a system call was not refused."""

OPENS = """
import os
def opens(path, flags=os.O_RDONLY):
    try: fd = os.open(path, flags | os.O_NONBLOCK)
    except OSError: return
    print("ESCAPED open", path)
    os.close(fd)
"""
"""`opens` tells when a file could be opened."""


# ---------------------------------------------------------------------------------------------- exhaustion

EXHAUSTION = [
    Payload(
        name="an output flood",
        group="exhaustion",
        code="while True: print('x' * 9999)",
        right=("output_limit",),
        lost=True,
    ),
    Payload(
        name="an output flood of a shell",
        group="exhaustion",
        code="yes",
        right=("output_limit",),
        lost=False,
        shell=True,
    ),
    Payload(
        name="a flood on both streams",
        group="exhaustion",
        code="import os, threading\n"
        "def flood(fd):\n    while True: os.write(fd, bytes(65536))\n"
        "for fd in (1, 2, 1, 2): threading.Thread(target=flood, args=(fd,), daemon=True).start()\n"
        "flood(2)",
        right=("output_limit",),
        lost=True,
    ),
    Payload(
        name="a flood by children that ignore all",
        group="exhaustion",
        code="trap '' INT TERM PIPE HUP; for i in 1 2 3 4; do yes & yes >&2 & done; yes",
        right=("output_limit",),
        lost=False,
        shell=True,
    ),
    Payload(
        name="a line without an end",
        group="exhaustion",
        code="import sys\nwhile True: sys.stdout.write('x' * 65536)",
        right=("output_limit",),
        lost=True,
    ),
    Payload(
        name="output by single bytes",
        group="exhaustion",
        code="import os\nfor _ in range(50_000): os.write(1, b'x')",
        right=("ok",),
        lost=False,
    ),
    Payload(
        name="invalid UTF-8 and NUL",
        group="exhaustion",
        code="import os; os.write(1, bytes(range(256)) * 9); os.write(2, bytes(999))",
        right=("ok",),
        lost=False,
    ),
    Payload(name="a lone surrogate", group="exhaustion", code="print('\\ud800')", right=("ok",), lost=False),
    Payload(name="a lone surrogate in the code", group="exhaustion", code="print('\ud800')", right=ENDED, lost=False),
    Payload(name="NUL in the code", group="exhaustion", code="print('a\0b')", right=("error",), lost=False),
    Payload(
        name="sleep past the limit",
        group="exhaustion",
        code="import time; time.sleep(60)",
        right=("timeout",),
        lost=False,
        timeout_s=0.2,
    ),
    Payload(
        name="a loop in C that hears no interrupt",
        group="exhaustion",
        code="sum(range(10 ** 15))",
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    Payload(
        name="an ignored SIGINT",
        group="exhaustion",
        code="import signal, time\nsignal.signal(2, signal.SIG_IGN)\ntime.sleep(60)",
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    Payload(
        name="every signal blocked",
        group="exhaustion",
        code="import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(60)",
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    Payload(
        name="a swallowed interrupt",
        group="exhaustion",
        code="import time\nwhile True:\n    try:\n        time.sleep(60)\n    except BaseException: pass",
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    Payload(
        name="an interrupt caught by a trace function",
        group="exhaustion",
        code="import sys, time\n"
        "def trace(*_):\n"
        "    try: time.sleep(60)\n"
        "    except BaseException: pass\n"
        "    return trace\n"
        "def go():\n    while True: time.sleep(0)\n"
        "sys.settrace(trace)\ngo()",
        right=("timeout",),
        timeout_s=0.2,
    ),
    Payload(
        name="a shell that ignores signals",
        group="exhaustion",
        code="trap '' INT TERM HUP; sleep 60; sleep 60",
        right=("timeout",),
        shell=True,
        timeout_s=0.2,
    ),
    Payload(
        name="a stopped worker",
        group="exhaustion",
        code="import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    Payload(
        name="a stopped group of processes",
        group="exhaustion",
        code="sleep 60 & sleep 60 & kill -STOP 0",
        right=("timeout",),
        shell=True,
        timeout_s=0.2,
    ),
    Payload(
        name="an alarm that ends the worker",
        group="exhaustion",
        code="import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(60)",
        right=("killed",),
        lost=True,
    ),
    Payload(
        name="a main thread that left its threads behind",
        group="exhaustion",
        code="import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "ctypes.PyDLL(None).syscall(60, 0)",  # PyDLL: the thread leaves with the interpreter's lock in its hand.
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    Payload(name="deep recursion", group="exhaustion", code="def f(): f()\nf()", right=("error",), lost=False),
    Payload(
        name="a recursion over the stack's end",
        group="exhaustion",
        code="import sys\nsys.setrecursionlimit(10 ** 9)\n"
        "class A:\n    def __getattr__(self, name): return getattr(self, name + 'x')\n"
        "class B(list):\n    def __repr__(self): return repr(B())\nrepr(B())",
        right=("killed", "error", "oom"),
        timeout_s=30.0,
    ),
    Payload(name="deep parentheses", group="exhaustion", code="(" * 200_000, right=("error",), lost=False),
    Payload(name="a deep expression", group="exhaustion", code="-" * 300_000 + "1", right=("error", "killed")),
    Payload(
        name="an exception of 30 MB",
        group="exhaustion",
        code="raise ValueError('x' * 30_000_000)",
        right=("error", "output_limit"),
    ),
    Payload(
        name="a chain of exceptions",
        group="exhaustion",
        code="e = None\nfor i in range(3_000):\n    new = ValueError(i); new.__cause__ = e; e = new\nraise e",
        right=("error",),
        lost=False,
    ),
    Payload(
        name="too many open files",
        group="exhaustion",
        code="x = [open('/dev/null') for _ in range(9999)]",
        right=("error",),
        lost=False,
    ),
    Payload(
        name="watches, timers and polls until there are no more",
        group="exhaustion",
        code="import ctypes, select, os\nlibc = ctypes.CDLL(None)\n"
        "made = [libc.inotify_init() for _ in range(600)] + [libc.timerfd_create(1, 0) for _ in range(600)]\n"
        "polls = [select.epoll() for _ in range(600)]",
        right=("error",),
        lost=False,
    ),
    Payload(name="too much memory", group="exhaustion", code="x = b'x' * (3 << 30)", right=("error", "oom")),
    Payload(
        name="a memory bomb that catches its errors",
        group="exhaustion",
        code="x = []\nwhile True:\n    try: x.append(bytearray(8 << 20))\n    except MemoryError: raise SystemExit(3)",
        right=("error", "oom"),
    ),
    Payload(
        name="a fork bomb",
        group="exhaustion",
        code="import os, time\nfor _ in range(12):\n    try: os.fork()\n    except OSError: pass\ntime.sleep(60)",
        right=("timeout",),
        timeout_s=0.5,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="a fork bomb of a shell",
        group="exhaustion",
        code="f() { f | f & }; f; sleep 60",
        right=("timeout", "error", "killed"),
        shell=True,
        timeout_s=0.5,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="processes that fork faster than they are killed",
        group="exhaustion",
        code="import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True:\n"
        "        try:\n"
        "            if os.fork(): os._exit(0)\n"
        "        except OSError: pass",
        right=("ok",),
        kinds=ISOLATED,
    ),
    Payload(
        name="sleepers that fill the box",
        group="exhaustion",
        code="import subprocess\nfor _ in range(2000): subprocess.Popen(['sleep', '60'])",
        right=("error",),
        lost=False,
        timeout_s=30.0,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="the dead that fill the box",
        group="exhaustion",
        code="import os\nfor _ in range(9999):\n    if os.fork() == 0: os._exit(0)",
        right=("error",),
        lost=False,
        timeout_s=30.0,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="too many threads",
        group="exhaustion",
        code="import threading\ngo = threading.Event()\n"
        "for _ in range(2000): threading.Thread(target=go.wait, daemon=True).start()",
        right=("error",),
        timeout_s=30.0,
        kinds=ISOLATED,
    ),
    Payload(
        name="children that share out the memory",
        group="exhaustion",
        code="import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        x = b'x' * (200 << 20); time.sleep(60)\n"
        "for _ in range(4): os.wait()",
        right=("ok", "error", "oom", "timeout"),
        timeout_s=2.0,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="a full disk",
        group="exhaustion",
        code="f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        right=("error", "oom"),
        kinds=ISOLATED,
    ),
    Payload(
        name="every folder in memory full",
        group="exhaustion",
        code="for d in /tmp /dev/shm /dev/mqueue; do cat /dev/zero > $d/full; done",
        right=("error", "killed", "oom"),
        shell=True,
        kinds=ISOLATED,
    ),
    Payload(
        name="files in memory without a name",
        group="exhaustion",
        code="import os\nkept = []\nfor _ in range(6):\n"
        "    fd = os.memfd_create('x'); kept.append(fd)\n"
        "    for _ in range(100): os.write(fd, bytes(1 << 20))",
        right=("ok", "error", "oom"),
        kinds=ISOLATED,
    ),
    Payload(
        name="shared memory that nobody holds",
        group="exhaustion",
        code="import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"
        "for key in range(12):\n"
        "    at = libc.shmat(libc.shmget(0, 64 << 20, 0o1666), None, 0)\n"
        "    if at in (None, 2 ** 64 - 1): raise MemoryError\n"
        "    ctypes.memset(at, 1, 64 << 20); libc.shmdt(ctypes.c_void_p(at))",
        right=("ok", "error", "oom"),
        following=("ok", "oom", "killed", "error"),
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="pipes and sockets full to the brim",
        group="exhaustion",
        code="import fcntl, os, socket\nkept = []\n"
        "try:\n"
        "    while True:\n"
        "        r, w = os.pipe(); kept += [r, w]; os.set_blocking(w, False)\n"
        "        fcntl.fcntl(w, 1031, 1 << 20); os.write(w, bytes(1 << 20))\n"
        "except OSError: pass\nlen(kept) > 10",
        right=("ok", "oom"),
        kinds=ISOLATED,
    ),
    Payload(
        name="files without end",
        group="exhaustion",
        code="import os\nos.mkdir('many')\nos.chdir('many')\nfor i in range(3_000): os.mknod(str(i))",
        right=("ok", "error"),
        lost=False,
    ),
    Payload(
        name="signals queued without end",
        group="exhaustion",
        code="import ctypes, os, signal\nlibc = ctypes.CDLL(None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])\n"
        "for _ in range(20_000): libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None)",
        right=("ok",),
        kinds=ISOLATED,
    ),
    Payload(
        name="more processors than there are",
        group="exhaustion",
        code="import os\nfor _ in range(3): os.fork()\nwhile True: pass",
        right=("timeout",),
        timeout_s=0.3,
        kinds=ISOLATED,
    ),
]

# ---------------------------------------------------------------------------------------------- escape

PROC_1 = (
    "mem",
    "environ",
    "maps",
    "auxv",
    "stack",
    "syscall",
    "fd/3",
    "root/etc",
    "cwd",
    "map_files",
    "pagemap",
    "exe",
)
SPOILS = ("oom_score_adj", "clear_refs", "coredump_filter", "comm", "mem", "sched", "setgroups")
DEVICES = (
    "mem kmem kmsg port sda vda nvme0n1 fuse net/tun kvm vsock vhost-vsock loop-control loop0 mapper/control snapshot"
)
HOST_CALLS = """
NEW = {"CGROUP": 1 << 25, "UTS": 1 << 26, "IPC": 1 << 27, "USER": 1 << 28, "PID": 1 << 29, "NET": 1 << 30}
NEW["NS"] = 1 << 17
for name, flag in NEW.items():
    reaches("unshare " + name, 272, flag)
reaches("clone3 into a user namespace", 435, ctypes.create_string_buffer(bytes([0, 0, 0, 16]) + bytes(60), 64), 64)
reaches("mount", 165, b"none", b"/tmp", b"tmpfs", 0, 0)
reaches("remount", 165, b"none", b"/", 0, 32, 0)
reaches("umount", 166, b"/tmp", 2)
reaches("pivot_root", 155, b"/tmp", b"/tmp")
reaches("chroot", 161, b"/tmp")
reaches("fsopen", 430, b"tmpfs", 0)
reaches("open_tree a copy", 428, -100, b"/", 1)
reaches("mount_setattr", 442, -100, b"/", 0, ctypes.create_string_buffer(32), 32)
reaches("setns", 308, os.open("/proc/self/ns/net", os.O_RDONLY), 0)
"""
KERNEL_CALLS = """
buffer = ctypes.create_string_buffer(256)
reaches("io_uring_setup", 425, 4, buffer)
reaches("bpf", 321, 0, buffer, 128)
reaches("perf_event_open", 298, buffer, 0, -1, -1, 0)
reaches("userfaultfd", 323, 1)
reaches("kexec_load", 246, 0, 0, 0, 1 << 63)
reaches("init_module", 175, buffer, 0, b"")
reaches("finit_module", 313, -1, b"", 0)
reaches("open_by_handle_at", 304, -100, buffer, 0)
reaches("add_key", 248, b"user", b"agentgym", b"evil", 4, -4)
reaches("request_key", 249, b"user", b"agentgym", 0, -4)
reaches("keyctl", 250, 0, -4, 1)
reaches("acct", 163, b"/tmp/none")
reaches("swapon", 167, b"/tmp/none", 0)
reaches("reboot", 169, 1, 2, 3, 0)
reaches("sethostname", 170, b"evil", 4)
reaches("iopl", 172, 3)
reaches("ioperm", 173, 0, 1, 1)
reaches("settimeofday", 164, buffer, 0)
reaches("clock_settime", 227, 0, buffer)
reaches("quotactl", 179, 0, 0, 0, 0)
reaches("syslog", 103, 3, buffer, 100)
reaches("fanotify_init", 300, 0, 0)
reaches("lookup_dcookie", 212, 0, buffer, 100)
"""
PARENT_CALLS = """
class IOVec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
ppid, room = os.getppid(), ctypes.create_string_buffer(64)
for request in (16, 0x4206):
    reaches("ptrace", 101, request, ppid, 0, 0)
mine, theirs = IOVec(ctypes.addressof(room), 8), IOVec(id(os), 8)
reaches("process_vm_readv", 310, ppid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
reaches("process_vm_writev", 311, ppid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
parent = os.pidfd_open(ppid)
for fd in range(3, 12):
    reaches("pidfd_getfd", 438, parent, fd, 0)
reaches("kcmp", 312, os.getpid(), ppid, 1, 0, 0)
reaches("move_pages", 279, ppid, 0, 0, 0, 0, 0)
reaches("migrate_pages", 256, ppid, 0, 0, 0)
reaches("get_robust_list", 274, ppid, room, room)
"""
SPOIL_PARENT = """
import os, resource
ppid = os.getppid()
def got(name, change, *args):
    try: change(*args)
    except (OSError, ValueError): return
    print("ESCAPED", name)
for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    got("prlimit", resource.prlimit, ppid, what, resource.prlimit(0, what))
got("nice", os.setpriority, os.PRIO_PROCESS, ppid, 5)
got("affinity", os.sched_setaffinity, ppid, {min(os.sched_getaffinity(0))})
got("scheduler", os.sched_setscheduler, ppid, os.SCHED_IDLE, os.sched_param(0))
"""
SOCKETS = """
import socket
for family in range(64):
    for kind in (1, 2, 3, 5):
        try: made = socket.socket(family, kind)
        except OSError: continue
        if family not in (1, 2, 10, 16): print("ESCAPED family", family, kind)
        if kind == 3 and family not in (1, 16): print("ESCAPED raw socket", family)
        made.close()
try: names = [name for _, name in socket.if_nameindex()]
except OSError: names = []
if names not in ([], ["lo"]): print("ESCAPED", names)
"""
NETWORK = """
import socket
for address in (("1.1.1.1", 53), ("169.254.169.254", 80), ("172.17.0.1", 2375), ("10.0.2.2", 80), ("8.8.8.8", 443)):
    try: socket.create_connection(address, timeout=1)
    except OSError: continue
    print("ESCAPED", address)
for address in (("8.8.8.8", 53), ("255.255.255.255", 67), ("224.0.0.251", 5353)):
    try:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        made.sendto(b"x", address)
    except OSError: continue
    print("ESCAPED", address)
"""
HOST_SOCKETS = """
import os, socket
names = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket"]
for folder, _, files in os.walk("/run"): names += [os.path.join(folder, f) for f in files]
names += ["\\0" + line.split("@", 1)[1].strip() for line in open("/proc/net/unix") if " @" in line]
for name in names:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        made = socket.socket(socket.AF_UNIX, kind)
        try: made.connect(name)
        except OSError: continue
        print("ESCAPED", repr(name))
"""
WRITES = """
import os
for line in open("/proc/self/mountinfo"):
    folder = line.split()[4]
    if folder in ("/tmp", "/dev/shm", "/dev/mqueue", "/branches"): continue
    for place in (folder, os.path.dirname(folder)):
        try: fd = os.open(os.path.join(place, "agentgym-evil"), os.O_WRONLY | os.O_CREAT)
        except OSError: continue
        print("ESCAPED", place)
for root in ("/proc/sys", "/sys"):
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not os.path.islink(os.path.join(folder, f))]
        for name in files:
            try: fd = os.open(os.path.join(folder, name), os.O_WRONLY)
            except OSError: continue
            os.close(fd)
            print("ESCAPED", folder, name)
names = "/proc/sysrq-trigger /proc/self/exe /proc/1/exe /agentgym/server/start.py /etc/passwd /usr/bin/python3"
for path in names.split():
    try: os.open(path, os.O_WRONLY)
    except OSError: continue
    print("ESCAPED", path)
"""
PRIVILEGES = """
import ctypes, os
for change in (os.setuid, os.setgid, os.seteuid):
    try: change(0)
    except OSError: continue
    print("ESCAPED", change)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    if int(status[name], 16): print("ESCAPED", name, status[name])
if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) != 1: print("ESCAPED no_new_privs")
"""
SETUID = (
    "for f in $(find / -xdev -perm /6000 -type f 2>/dev/null); do echo '' | timeout 1 $f -c id 2>&1 | grep -q 'uid=0' "
    "&& echo ESCAPED $f; done; cp /bin/sh s; chmod 6755 s; ./s -c 'id' | grep 'uid=0' && echo ESCAPED; true"
)

ESCAPE = [
    Payload(
        name="the parent's memory and descriptors",
        group="escape",
        code=OPENS
        + f"for name in {PROC_1}:\n    opens(f'/proc/{{os.getppid()}}/{{name}}')\n"
        + f"for name in {SPOILS}:\n    opens(f'/proc/{{os.getppid()}}/{{name}}', os.O_WRONLY)\n"
        + "try: print('ESCAPED', os.listdir(f'/proc/{os.getppid()}/fd'))\nexcept OSError: pass",
        right=("ok",),
        lost=False,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="calls that reach into the parent",
        group="escape",
        code=SYSCALLS + PARENT_CALLS,
        right=("ok",),
        lost=False,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="the parent's limits and priority",
        group="escape",
        code=SPOIL_PARENT,
        right=("ok",),
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="the parent starved of files and processor time",
        group="escape",
        code="import os, resource\n"
        "for what, value in ((resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_CPU, 1), (resource.RLIMIT_AS, 1 << 20)):\n"
        "    try: resource.prlimit(os.getppid(), what, (value, value))\n"
        "    except (OSError, ValueError): pass",
        right=("ok",),
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="the death of the parent",
        group="escape",
        code="import os; os.kill(os.getppid(), 9)",
        right=("ok",),
        lost=False,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="a stopped parent",
        group="escape",
        code="import os; os.kill(os.getppid(), 19); os.kill(os.getppid(), 20)",
        right=("ok",),
        lost=False,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="every signal for the parent",
        group="escape",
        code="import os, signal\nfor _ in range(50):\n    for n in signal.valid_signals(): os.kill(os.getppid(), n)",
        right=("ok",),
        lost=False,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="the death of all",
        group="escape",
        code="import os; os.fork(); os.kill(-1, 9)",
        right=("ok", "killed", "error"),
        kinds=ISOLATED,
    ),
    Payload(
        name="a stop for all",
        group="escape",
        code="kill -STOP -1",
        right=("ok", "timeout"),
        following=("ok", "timeout"),
        shell=True,
        timeout_s=0.5,
        kinds=ISOLATED,
    ),
    Payload(
        name="the parent continued without end",
        group="escape",
        code="import os\nif os.fork() == 0:\n    while True: os.kill(os.getppid(), 18); os.kill(1, 2)",
        right=("ok",),
        kinds=ISOLATED,
    ),
    Payload(
        name="namespaces and mounts",
        group="escape",
        code=SYSCALLS + HOST_CALLS,
        right=("ok",),
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="calls into the kernel",
        group="escape",
        code=SYSCALLS + KERNEL_CALLS,
        right=("ok",),
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="mount and unshare as programs",
        group="escape",
        code="mount -t tmpfs none /tmp && echo ESCAPED; unshare -Ur true && echo ESCAPED; "
        "unshare -m true && echo ESCAPED; "
        "nsenter -t 1 -m true && echo ESCAPED; mount -o remount,rw / && echo ESCAPED; true",
        right=("ok",),
        shell=True,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(
        name="devices",
        group="escape",
        code=OPENS
        + f"for name in '{DEVICES}'.split():\n    opens('/dev/' + name)\n"
        + "opens('/dev/tty', os.O_RDWR)\n"
        + "import stat\n"
        + "for kind, device in ((stat.S_IFBLK, (8, 0)), (stat.S_IFBLK, (254, 0)), (stat.S_IFCHR, (1, 1))):\n"
        + "    try: os.mknod('device', kind | 0o666, os.makedev(*device)); opens('device'); os.unlink('device')\n"
        + "    except OSError: pass",
        right=("ok",),
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(name="sockets of every family", group="escape", code=SOCKETS, right=("ok",), kinds=ISOLATED - {"runsc"}),
    Payload(name="the network", group="escape", code=NETWORK, right=("ok",), lost=False, kinds=ISOLATED),
    Payload(name="sockets of the host", group="escape", code=HOST_SOCKETS, right=("ok",), lost=False, kinds=ISOLATED),
    Payload(
        name="writes outside of the working folder",
        group="escape",
        code=WRITES,
        right=("ok",),
        lost=False,
        timeout_s=30.0,
        kinds=ISOLATED - {"runsc"},
    ),
    Payload(name="privileges", group="escape", code=PRIVILEGES, right=("ok",), lost=False, kinds=ISOLATED - {"runsc"}),
    Payload(
        name="setuid programs", group="escape", code=SETUID, right=("ok",), shell=True, timeout_s=60.0, kinds=ISOLATED
    ),
    Payload(
        name="a file of the host",
        group="escape",
        code=OPENS
        + "opens('CANARY')\nopens('CANARY', os.O_WRONLY)\n"
        + "opens('/proc/self/root/CANARY')\nopens('/proc/1/root/CANARY')\n"
        + "up = '../' * 40\nopens(up + 'CANARY')\nopens('/proc/self/cwd/' + up + 'CANARY')\nopens('/etc/shadow')\n"
        + "opens('/root')\nopens('/home')",
        right=("ok",),
        lost=False,
        kinds=ISOLATED - {"docker", "runsc"},
    ),
    Payload(
        name="a file of the host from a container",
        group="escape",
        code=OPENS
        + "opens('CANARY')\nopens('CANARY', os.O_WRONLY)\n"
        + "opens('/proc/self/root/CANARY')\nopens('/proc/1/root/CANARY')\n"
        + "up = '../' * 40\nopens(up + 'CANARY')\nopens('/proc/self/cwd/' + up + 'CANARY')\nopens('/etc/shadow')",
        right=("ok",),
        lost=False,
        kinds=frozenset({"docker", "runsc"}),
    ),
    Payload(
        name="processes of the host",
        group="escape",
        code="import os\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if int(pid) not in (1, os.getpid()): print('ESCAPED', open(f'/proc/{pid}/cmdline').read())",
        right=("ok",),
        lost=False,
        kinds=ISOLATED,
    ),
    Payload(
        name="hard links and open handles to what is read-only",
        group="escape",
        code="import os\nfor path in ('/etc/passwd', '/usr/bin/env', '/proc/self/exe'):\n"
        "    try: os.link(path, 'linked'); open('linked', 'r+b'); print('ESCAPED', path)\n"
        "    except OSError: pass\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try: target = os.readlink('/proc/self/fd/' + fd)\n"
        "    except OSError: continue\n"
        "    if target.startswith('/') and target != '/dev/null' and not target.endswith('/fd'):\n"
        "        print('ESCAPED', fd, target)",
        right=("ok",),
        lost=False,
        kinds=ISOLATED,
    ),
    Payload(
        name="the control group",
        group="escape",
        code="for d in /sys/fs/cgroup /sys/fs/cgroup/*; do for f in cgroup.procs tasks release_agent notify_on_release "
        "memory.limit_in_bytes memory.max pids.max devices.allow cgroup.subtree_control; do "
        "[ -e $d/$f ] && echo 1 2>/dev/null > $d/$f && echo ESCAPED $d/$f; done; "
        "mkdir $d/evil 2>/dev/null && echo ESCAPED $d; "
        "done; true",
        right=("ok",),
        shell=True,
        kinds=ISOLATED,
    ),
    Payload(
        name="keys pressed on the terminal",
        group="escape",
        code="import fcntl, os\n"
        "for fd in (0, 1, 2):\n"
        "    try: fcntl.ioctl(fd, 0x5412, b'x'); print('ESCAPED')\n"
        "    except OSError: pass",
        right=("ok",),
        kinds=ISOLATED,
    ),
]

# ---------------------------------------------------------------------------------------------- forgery


def forged(name: str, code: str, *right: Status, lost: bool | None = True, **more: object) -> Payload:
    """Code that has FRAMES at hand."""
    return Payload(name=name, group="forgery", code=FRAMES + code, right=right, lost=lost, **more)  # type: ignore[arg-type]


FORGERY = [
    forged(
        "frames on every descriptor",
        "answer = frame({'id': 1, 'status': 'ok', 'exit_code': 0, 'done': '0', 'body': 0})\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, answer)\n"
        "    except OSError: pass",
        "protocol",
    ),
    forged("a forged length", "os.write(3, b'\\xff' * 64)", "protocol"),
    forged("half a frame", "os.write(3, b'\\0\\0\\1')\nwhile True: pass", "protocol"),
    forged("an envelope that is not JSON", "os.write(3, frame(b'\\xff\\xfe{'))", "protocol"),
    forged("an envelope of brackets", "os.write(3, frame(b'[' * 4000))", "protocol"),
    forged("an envelope that is a list", "os.write(3, frame([1, 2]))", "protocol"),
    forged(
        "an envelope of a number of 4000 digits", "os.write(3, frame(b'{\"id\": ' + b'9' * 4000 + b'}'))", "protocol"
    ),
    forged("a body of a negative size", "os.write(3, frame({'id': call, 'done': 0, 'body': -1}))", "protocol"),
    forged("a body of no size", "os.write(3, frame({'id': call, 'ask': 1, 'body': None}))", "protocol"),
    forged("an answer with a body", "os.write(3, frame({'id': call, 'done': 0}, b'x'))", "protocol"),
    forged("an answer that is true", "os.write(3, frame({'id': call, 'done': True}))", "protocol"),
    forged("an answer of text", "os.write(3, frame({'id': call, 'done': '0'}))", "protocol"),
    forged("an answer to another call", "os.write(3, frame({'id': call + 1, 'done': 0}))", "protocol"),
    forged(
        "an answer to call true",
        "os.write(3, frame({'id': True, 'done': 0}))",
        "ok",
        "protocol",
        lost=None,
        following=("ok", "protocol"),
    ),
    forged(
        "the supervisor's facts in an answer",
        "os.write(3, frame({'id': call, 'status': 'timeout', 'state_lost': False, 'stdout': 0, 'stderr': 0}))",
        "protocol",
    ),
    forged(
        "an answer with the supervisor's facts beside it",
        "os.write(3, frame({'id': call, 'done': 0, 'status': 'oom', 'exit_code': -9, 'seconds': 1e9, 'stdout': 99}))\n"
        "os._exit(0)",
        "ok",
        "error",  # The exit may be seen first.
        lost=None,
        following=("ok", "error"),  # Or only by the next call, which then says that its state was lost.
    ),
    forged("a hello", "os.write(3, frame({'hello': 1, 'python': '9'}))", "protocol"),
    forged("an ask of text", "os.write(3, frame({'id': call, 'ask': 'f'}, b'[]'))", "protocol", functions=True),
    forged(
        "asks that are no questions",
        "said = []\n"
        "for body in (b'', b'{}', b'[]', b'[1, 2, 3]',\n"
        "             b'[\"f\", {}, {}]', b'[\"f\", [], []]', b'[\"__class__\", [], {}]',\n"
        "             b'[\"f\", [], {}, 1]', b'[' * 100_000, b'1' * 9_000, b'\\xff', b'NaN', b'[\"f\", [NaN], {}]'):\n"
        "    os.write(3, frame({'id': call, 'ask': 7}, body))\n"
        "    size = struct.unpack('>I', os.read(3, 4))[0]\n"
        "    said.append(os.read(3, json.loads(os.read(3, size))['body']))\n"
        "print(len(said), sum(b'error' in s for s in said))",
        "ok",
        lost=False,
        functions=True,
    ),
    forged(
        "an ask of a function that is not offered",
        "os.write(3, frame({'id': call, 'ask': 1}, json.dumps(['__import__', ['os'], {}]).encode()))\ntime.sleep(0.05)",
        "ok",
        "protocol",
        lost=None,
        following=("ok", "protocol"),
    ),
    forged(
        "an ask over the limit",
        'os.write(3, struct.pack(\'>I\', 30) + b\'{"id": 1, "ask": 1, "body": 9999999}\')',
        "protocol",
    ),
    forged(
        "a flood of asks that nobody waits for",
        "ask = frame({'id': call, 'ask': 1}, b'[\"f\", [], {}]')\n"
        "threading.Thread(target=lambda: [os.read(3, 65536) for _ in iter(int, 1)], daemon=True).start()\n"
        "while True: os.write(3, ask)",
        "protocol",
        functions=True,
    ),
    forged(
        "asks whose answers nobody reads",
        "ask = frame({'id': call, 'ask': 1}, json.dumps(['f', ['x' * 100_000], {}]).encode())\n"
        "while True: os.write(3, ask)",
        "protocol",
        "timeout",
        functions=True,
        timeout_s=2.0,
    ),
    forged("closed descriptors", "os.closerange(0, 1024)", "protocol"),
    forged(
        "a channel shut down", "import socket\nsocket.socket(fileno=os.dup(3)).shutdown(2)\ntime.sleep(60)", "protocol"
    ),
    forged("a channel that is something else now", "os.dup2(0, 3)", "protocol"),
    forged(
        "descriptors sent over the channel",
        "import socket\nchannel = socket.socket(fileno=os.dup(3))\n"
        "for _ in range(20): socket.send_fds(channel, [b'\\0'], [0, 1, 2])\n",
        "protocol",
    ),
    forged("patched json", "import builtins\njson.dumps = lambda *a, **k: '[]'\nbuiltins.len = None", "protocol"),
    forged(
        "a patched server",
        "here = sys._getframe(1)\nhere.f_globals['write_frame'] = lambda *a, **k: None\n"
        "here.f_globals['os'] = here.f_globals['read_frame'] = None",
        "protocol",
        "error",
    ),
    forged(
        "patched streams",
        "class No:\n    def write(self, _): raise OSError\nsys.stdout = sys.stderr = No()\n1 / 0",
        "error",
        lost=False,
        following=("ok", "error"),
        honest=False,
    ),
    forged(
        "streams that are gone",
        "del sys.stdout, sys.stderr\n1 / 0",
        "error",
        lost=False,
        following=("ok", "error"),
        honest=False,
    ),
    forged(
        "streams that raise what nobody expects",
        "class No:\n    def __getattr__(self, name): raise KeyboardInterrupt\nsys.stdout = sys.stderr = No()\n1 / 0",
        "error",
        "protocol",
        lost=None,
        following=("ok", "error"),
        honest=False,
    ),
    forged("an exit without an answer", "os._exit(0)", "error"),
    forged("an exit with the code of a lost channel", "os._exit(70)", "protocol", "error"),
    forged("an exit code over a byte", "raise SystemExit(2 ** 70)", "ok", lost=False),
    forged(
        "an exit code that cannot be shown",
        "class E:\n    def __str__(self): raise self\nraise SystemExit(E())",
        "error",
        lost=False,
    ),
    forged("its own death", "os.kill(os.getpid(), 9)", "killed"),
    forged("a crash", "import ctypes; ctypes.string_at(0)", "killed"),
    forged("answers of forked children", "for _ in range(3): os.fork()", "ok", lost=False),
    forged(
        "an answer by a child while the parent waits",
        "if os.fork() == 0:\n    os.write(3, frame({'id': call, 'done': 0})); os._exit(0)\nos.wait(); time.sleep(0.2)",
        "protocol",
    ),
    forged(
        "a daemon that answers in the worker's place",
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        while True:\n"
        "            try: head = os.read(3, 4)\n"
        "            except OSError: os._exit(0)\n"
        "            if not head: os._exit(0)\n"
        "            got = json.loads(os.read(3, struct.unpack('>I', head)[0]))\n"
        "            os.read(3, got.get('body', 0)); os.write(1, b'forged')\n"
        "            os.write(3, frame({'id': got['id'], 'done': 0}))\n"
        "    os._exit(0)\n"
        "os.wait()",
        "ok",
        "protocol",
        lost=None,
        following=("ok", "protocol", "timeout"),
    ),
    forged(
        "an answer ahead of the end",
        "os.write(3, frame({'id': call, 'done': 0}))\ntime.sleep(0.2)",
        "ok",
        "protocol",
        lost=None,
        following=("ok", "protocol"),
    ),
    forged(
        "an answer and no end",
        "os.write(3, frame({'id': call, 'done': 0}))\nwhile True: time.sleep(1)",
        "ok",
        "protocol",
        lost=None,
        following=("ok", "protocol", "timeout"),
    ),
    forged(
        "an answer given twice",
        "os.write(3, frame({'id': call, 'done': 0}) * 2)",
        "ok",
        "protocol",
        lost=None,
        following=("ok", "protocol"),
    ),
    forged(
        "answers for calls to come",
        "for i in range(1, 20): worker().call = call\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), os.write(3, b''.join(frame({'id': call + i, 'done': 0}) "
        "for i in range(1, 9))))).start()",
        "ok",
        lost=None,
        following=("ok", "protocol"),
    ),
    forged(
        "bytes for the channel after the call",
        "threading.Thread(target=lambda: (time.sleep(0.05), os.write(3, b'junk'))).start()",
        "ok",
        lost=None,
        following=("ok", "protocol"),
    ),
    forged("the worker's own call changed", "worker().call = 999", "protocol"),
    forged("a worker that thinks it is another", "worker().pid = 1", "error", "protocol", lost=None),
    forged(
        "a worker whose methods are ours",
        "type(worker()).run = lambda self, source: 0\ntype(worker()).execute = None",
        "ok",
        lost=False,
        following=("ok", "error"),
        honest=False,
    ),
    forged(
        "no memory of the host in the garbage",
        "import gc\nprint([o for o in gc.get_objects() if type(o).__name__ in ('Supervisor', 'Child', 'Call')])",
        "ok",
        lost=False,
    ),
    forged(
        "a trace of the server",
        "sys.settrace(lambda frame, *_: (_ for _ in ()).throw(KeyError))",
        "ok",
        "error",
        "protocol",
        lost=None,
        following=("ok", "error", "protocol"),
        honest=False,
    ),
    forged(
        "a profile of the server that never returns",
        "def hang(*_):\n    while True: time.sleep(1)\nworker().running = True\nsys.setprofile(hang)",
        "timeout",
        "protocol",
        lost=None,
        timeout_s=0.3,
    ),
    forged(
        "an exit hook",
        "import atexit\natexit.register(lambda: os.write(3, b'junk'))\nraise SystemExit(0)",
        "ok",
        lost=False,
    ),
    forged(
        "a finalizer",
        "class D:\n    def __del__(self): os.write(3, frame({'id': 0, 'done': 0}))\nD()\nNone",
        "protocol",
    ),
    forged(
        "an exception that cannot be shown",
        "class E(Exception):\n    def __str__(self): raise self\nraise E()",
        "error",
        lost=False,
    ),
    forged(
        "an exception that hangs when it is shown",
        "class E(Exception):\n    def __str__(self):\n        while True: time.sleep(0.1)\nraise E()",
        "timeout",
        lost=None,
        timeout_s=0.3,
    ),
    forged("a value whose repr leaves", "class V:\n    def __repr__(self): os._exit(0)\nV()", "error"),
    forged(
        "a result that claims to be another", "class V:\n    def __repr__(self): return 7\nV()", "error", lost=False
    ),
    forged(
        "an interrupt handler that answers",
        "import signal\nsignal.signal(2, lambda *_: os.write(3, frame({'id': call, 'done': 0})))\n"
        "while True: time.sleep(1)",
        "timeout",
        lost=None,
        timeout_s=0.3,
        following=("ok", "protocol", "timeout"),
    ),
    forged(
        "a module of the standard library replaced",
        "for name in list(sys.modules): sys.modules[name] = None",
        "ok",
        "error",
        "protocol",
        lost=None,
        following=("ok", "error"),
        honest=False,
    ),
    Payload(
        name="markers in the output",
        group="forgery",
        code='echo \'{"id": 1, "status": "ok", "exit_code": 0}\'; printf \'\\0\\0\\0\\2{}\'; exit 9',
        right=("error",),
        shell=True,
        lost=False,
    ),
    Payload(
        name="a shell's frames on every descriptor",
        group="forgery",
        code="for i in 0 3 4 5 6 7 8 9; do printf '\\0\\0\\0\\2{}' >&$i; done 2>/dev/null; "
        "ls /proc/self/fd | wc -l; exit 5",
        right=("error",),
        shell=True,
        lost=False,
    ),
]

# ---------------------------------------------------------------------------------------------- persistence

DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        while True:
            time.sleep(0.01)
            try: open('beat', 'w').write('x')
            except OSError: pass
    os._exit(0)
os.wait()
"""
STUBBORN = """
import ctypes, os, signal, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
"""
STARTUP = """
d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d
echo 'import os; print("evil")' > $d/evil.pth
for f in $d/sitecustomize.py $d/usercustomize.py sitecustomize.py usercustomize.py json.py os.py re.py; do
  echo 'print("evil")' > $f
done
for f in .bashrc .profile .bash_profile .bash_login .pythonrc.py .inputrc; do echo 'echo evil' > ~/$f; done
export BASH_ENV=~/.bashrc ENV=~/.bashrc PYTHONSTARTUP=~/.pythonrc.py PYTHONPATH=/tmp LD_PRELOAD=/tmp/evil.so
"""
STATE = """
import builtins, gc, locale, os, random, resource, signal, sys, threading, time
builtins.print, builtins.evil = (lambda *a: None), 1
os.environ.update(PYTHONPATH='/tmp', LD_PRELOAD='/tmp/evil.so', EVIL='1')
sys.path.insert(0, '/tmp/evil'); sys.modules['evil'] = os; sys.evil = 1; time.time = None
sys.setrecursionlimit(99); os.umask(0o777); os.chdir('/'); os.nice(5); gc.disable(); random.seed(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); type(sys.stdout).evil = 1 if False else None
""".replace("; type(sys.stdout).evil = 1 if False else None", "")
IPC = """
import ctypes
libc = ctypes.CDLL(None)
for key in (4242, 4243):
    libc.shmget(key, 4096, 0o1666); libc.semget(key, 3, 0o1666); libc.msgget(key, 0o1666)
libc.msgsnd(libc.msgget(4242, 0), b'\\1' + bytes(7) + b'canary', 6, 0)
for i in range(5): libc.mq_open(b'/evil%d' % i, 0o102, 0o666, None)
"""
NAMES = """
import os
for name in (b'\\xff\\xfe', b'new\\nline', b'x' * 255, b' ', b'-rf', b'...', b'.hidden', b'\\x1b[2J', b'*'):
    for place in (b'/tmp', b'/dev/shm'):
        try: os.mkdir(place + b'/' + name); open(place + b'/' + name + b'/' + name, 'w'); os.link(
            place + b'/' + name + b'/' + name, place + b'/' + name + b'/2')
        except OSError: pass
"""
MARKS = """
import os
for place in ('/tmp', '/dev/shm', '/dev/mqueue', '/branches'):
    for key in ('user.evil', 'trusted.evil', 'security.evil', 'system.posix_acl_default'):
        value = bytes.fromhex('0200000001000700ffffffff04000700ffffffff20000000ffffffff') if 'acl' in key else b'evil'
        try: os.setxattr(place, key, value)
        except OSError: pass
    for change in (lambda: os.chmod(place, 0), lambda: os.utime(place, (1, 1)), lambda: os.chown(place, -1, 0)):
        try: change()
        except OSError: pass
"""
WIDE = "import os\nfor i in range(150):\n    for j in range(10): os.makedirs(f'{i}/{j}/x/y/z')\n    os.chmod(str(i), 0)"
CHAIN = "import os\nfor _ in range(1500):\n    os.mkdir('d' * 60); os.chdir('d' * 60)\nopen('end', 'w')"
LISTENERS = """
import os, socket
if os.fork() == 0:
    kept = []
    for name in ('\\0evil', '/tmp/evil.sock', '/dev/shm/evil.sock'):
        made = socket.socket(socket.AF_UNIX); made.bind(name); made.listen(); kept.append(made)
    kept[0].accept()
"""

PERSISTENCE = [
    Payload(name="a daemon", group="persistence", code=DAEMON, right=("ok",), lost=False),
    Payload(
        name="daemons that adopt, ignore and stop",
        group="persistence",
        code=STUBBORN,
        right=("ok",),
        lost=False,
        kinds=BUT_GVISOR,
    ),
    Payload(
        name="a daemon of a shell",
        group="persistence",
        code="setsid nohup sleep 99.25 >/dev/null 2>&1 & (trap '' HUP TERM INT; setsid sleep 99.25) & disown -a; true",
        right=("ok",),
        shell=True,
    ),
    Payload(
        name="a thread that outlives its cell",
        group="persistence",
        code="import os, threading, time\n"
        "def beat():\n"
        "    while True: time.sleep(0.01); open('beat', 'w').write('x')\n"
        "threading.Thread(target=beat).start()",
        right=("ok",),
        lost=False,
    ),
    Payload(name="a deep tree", group="persistence", code=CHAIN, right=("ok",), lost=False),
    Payload(name="a wide tree that is locked", group="persistence", code=WIDE, right=("ok",), lost=False),
    Payload(
        name="a locked tree with links",
        group="persistence",
        code="mkdir -p a/b/c; touch a/b/c/f a/f; ln -s /etc a/l; ln a/f a/b/hard; mkfifo a/p; chmod 000 a/b/c a/b a",
        right=("ok",),
        shell=True,
    ),
    Payload(
        name="links out, pipes and sockets",
        group="persistence",
        code="ln -s / root; ln -s /etc/passwd p; ln -s .. up; ln -s /dev/shm shm; ln -s loop loop; mkfifo pipe; "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
        right=("ok",),
        shell=True,
    ),
    Payload(name="files by odd names", group="persistence", code=NAMES, right=("ok",), lost=False, kinds=ISOLATED),
    Payload(name="marks on the folders themselves", group="persistence", code=MARKS, right=("ok",), kinds=ISOLATED),
    Payload(name="code that runs at the start", group="persistence", code=STARTUP, right=("ok",), shell=True),
    Payload(
        name="the interpreter's state",
        group="persistence",
        code=STATE,
        right=("ok",),
        lost=False,
        following=("ok", "error"),
        honest=False,
    ),
    Payload(
        name="System V objects and queues", group="persistence", code=IPC, right=("ok",), lost=False, kinds=ISOLATED
    ),
    Payload(name="sockets that listen", group="persistence", code=LISTENERS, right=("ok",), lost=False, kinds=ISOLATED),
    Payload(
        name="locks and mappings that are held",
        group="persistence",
        code="import fcntl, mmap, os\n"
        "if os.fork() == 0:\n"
        "    f = open('/usr/bin/env', 'rb'); fcntl.flock(f, 2 | 4)\n"
        "    g = open('held', 'wb'); g.write(bytes(4096)); g.flush()\n"
        "    fcntl.lockf(g, 2 | 4); m = mmap.mmap(os.open('held', 2), 4096); os.unlink('held')\n"
        "    import time; time.sleep(60)",
        right=("ok",),
        lost=False,
        kinds=ISOLATED,
    ),
    Payload(
        name="the working folder removed",
        group="persistence",
        code='rm -rf /tmp/* "$PWD" 2>/dev/null; mkdir -p "$PWD" 2>/dev/null; true',
        right=("ok",),
        shell=True,
        kinds=ISOLATED,
    ),
    Payload(
        name="a clock and a timer that tick on",
        group="persistence",
        code="import signal, resource\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001); signal.setitimer(signal.ITIMER_PROF, 5, 5)",
        right=("ok",),
        lost=False,
    ),
]

# ---------------------------------------------------------------------------------------------- files

OUTSIDE = (
    "../x",
    "a/../../x",
    "/etc/passwd",
    "/etc/../tmp/x",
    "..",
    "/",
    "a\0b",
    "/proc/self/mem",
    "/tmpx/f",
    "./../..//x",
)


def files(name: str, code: str, *calls: FileCall, **more: object) -> Payload:
    """A shell command that prepares, and the calls that follow it."""
    given: dict[str, object] = {"shell": True, "right": ("ok",), **more}
    return Payload(name=name, group="files", code=code, calls=calls, **given)  # type: ignore[arg-type]


def read(path: str, *raises: type[Exception], match: str = "", may_return: bool = False) -> FileCall:
    return FileCall(op="read", path=path, raises=raises, match=match, may_return=may_return)


def write(path: str, *raises: type[Exception], match: str = "", content: bytes = b"x") -> FileCall:
    return FileCall(op="write", path=path, raises=raises, match=match, content=content)


def listing(path: str, *raises: type[Exception], match: str = "") -> FileCall:
    return FileCall(op="list", path=path, raises=raises, match=match)


FILES = [
    *(
        files(
            f"a path that leads out: {path!r}",
            "true",
            read(path, ValueError, match=r"outside|is a folder"),
            write(path, ValueError, match=r"outside|is a folder"),
            listing(path, ValueError, match="outside"),
        )
        for path in OUTSIDE
    ),
    files(
        "the folder itself as a file",
        "true",
        read("", ValueError, match="is a folder"),
        write("", ValueError, match="is a folder"),
        write(".", ValueError, match="is a folder"),
    ),
    files(
        "links to files",
        "ln -s /etc/passwd p; ln -s nowhere n; echo x > f; ln -s f l; ln -s loop loop",
        *(read(path, ValueError, match="is a link") for path in ("p", "n", "l", "loop")),
        *(write(path, ValueError, match="is a link") for path in ("p", "n", "l", "loop")),
    ),
    files(
        "links to folders",
        "ln -s / root; mkdir d; echo x > d/f; ln -s d l; ln -s .. up; ln -s /proc/self/root pr",
        *(
            read(path, OSError, match=r"Not a directory|symbolic")
            for path in ("root/etc/passwd", "l/f", "pr/etc/passwd")
        ),
        *(write(path, OSError, match=r"Not a directory|symbolic") for path in ("root/tmp/x", "l/g", "up/x")),
        *(listing(path, OSError, match=r"Not a directory|symbolic") for path in ("root", "l", "up", "pr")),
    ),
    files(
        "pipes, sockets and devices",
        "mkfifo pipe; mknod dev c 1 5 2>/dev/null; "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
        read("pipe", ValueError, match="is not a file"),
        write("pipe", OSError, ValueError, match=r"No such device|not configured|is not a file"),
        read("sock", OSError, ValueError, match=r"No such device|not configured|is not a file"),
        write("sock", OSError, ValueError, match=r"No such device|not configured|is not a file"),
        listing("pipe", NotADirectoryError),
    ),
    files(
        "a pipe with somebody at its other end",
        "import os; os.mkfifo('pipe'); fd = os.open('pipe', os.O_RDWR)",
        read("pipe", ValueError, match="is not a file"),
        write("pipe", ValueError, match="is not a file"),
        shell=False,
    ),
    files("a file over the limit", "head -c 2000000 /dev/zero > big", read("big", ValueError, match="the limit is")),
    files(
        "a file that says it is a terabyte",
        "import os\nfd = os.open('sparse', os.O_RDWR | os.O_CREAT)\n"
        "for size in (1 << 40, 1 << 26):\n"
        "    try: os.ftruncate(fd, size); break\n"
        "    except OSError: pass",
        read("sparse", ValueError, match="the limit is"),
        shell=False,
    ),
    files(
        "files and folders without a right",
        "mkdir d; echo x > d/f; echo x > f; chmod 000 f d",
        read("f", PermissionError),
        write("f", PermissionError),
        read("d/f", PermissionError),
        write("d/g", PermissionError),
        listing("d", PermissionError),
        kinds=ISOLATED,
    ),
    files("hard links", "echo x > f; ln f g", read("g"), write("g"), listing(".")),
    files(
        "folders where files should be",
        "mkdir -p d/e; echo x > f",
        read("d", ValueError, IsADirectoryError, match=r"is not a file|Is a directory"),
        write("d", IsADirectoryError),
        read("f/g", NotADirectoryError),
        write("f/g/h", NotADirectoryError),
        listing("f", NotADirectoryError),
        listing("none", FileNotFoundError),
        read("none", FileNotFoundError),
    ),
    files(
        "names that are too long or too many",
        "true",
        write("n" * 300, OSError, match="too long"),
        read("n" * 300, OSError, match="too long"),
        write("a/" * 1500 + "f"),
        read("a/" * 1500 + "f"),
        read("b/" * 100_000 + "f", FileNotFoundError),
    ),
    files(
        "names that are not text",
        "import os\nfor name in (b'\\xff\\xfe', b'new\\nline', b'\\xed\\xa0\\x80'): open(name, 'w')",
        listing("."),
        read("\ufffd\ufffd", FileNotFoundError),
        shell=False,
    ),
    files(
        "a write to a full disk",
        "head -c 300000000 /dev/zero > full; true",
        write("f", OSError, match="space", content=bytes(1 << 20)),
        kinds=ISOLATED,
    ),
    files(
        "a folder that is a link every other moment",
        "import os, itertools\nos.mkdir('real'); open('real/passwd', 'w').write('mine')\n"
        "if os.fork() == 0:\n"
        "    os.symlink('real', 'a'); os.symlink('/etc', 'b')\n"
        "    while True:\n"
        "        for way in (('real', 'door'), ('door', 'real'), ('b', 'door'), ('door', 'b')): os.rename(*way)",
        *[read("door/passwd", OSError, may_return=True)] * 200,
        shell=False,
    ),
    files(
        "a file that is a link every other moment",
        "import os\nopen('real', 'w').write('mine')\n"
        "if os.fork() == 0:\n"
        "    os.symlink('/etc/passwd', 'b')\n"
        "    while True:\n"
        "        for way in (('real', 'door'), ('door', 'real'), ('b', 'door'), ('door', 'b')): os.rename(*way)",
        *[read("door", OSError, ValueError, may_return=True)] * 200,
        shell=False,
    ),
    files(
        "a file that grows and shrinks while it is read",
        "import os\nfd = os.open('f', os.O_RDWR | os.O_CREAT)\n"
        "if os.fork() == 0:\n"
        "    while True: os.ftruncate(fd, 900_000); os.ftruncate(fd, 0)",
        *[read("f")] * 50,
        shell=False,
    ),
    files("many names in one folder", "mkdir d; cd d; seq 5000 | xargs touch", listing("d"), timeout_s=30.0),
]

PAYLOADS = [*EXHAUSTION, *ESCAPE, *FORGERY, *PERSISTENCE, *FILES]
