"""The server's start: the wire is taken, this process becomes a zygote, and the supervisor serves."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import site
import socket
import sys
import types

from .children import QUIET, Exits, close_from
from .frames import Wire
from .limits import ALONE, FOLDER, PACKAGE, PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, WIRE_IN, WIRE_OUT, libc
from .network import hand_over
from .supervisor import Supervisor

TYPE_CHECKING = False  # Importing typing would cost each new box some milliseconds.
if TYPE_CHECKING:
    from typing import Any, NoReturn


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
    forget_package()
    # Found by path and not by `site.main`: no .pth file and no sitecustomize runs.
    sys.path += [path for path in site.getsitepackages() if path not in sys.path and os.path.isdir(path)]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    gc.collect()
    gc.freeze()
    gc.disable()


def forget_package() -> None:
    """Take the server's modules out of `import`'s sight: code in the box has a `files` or a `server` of its own."""
    above = os.path.dirname(FOLDER.rstrip("/"))
    sys.path[:] = [path for path in sys.path if path and path != above]
    KEPT.extend(sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == PACKAGE)


KEPT: list[types.ModuleType] = []
"""The server's modules: nothing else holds them."""


def main() -> NoReturn:
    config = json.loads(sys.argv[1])
    if not ALONE:
        for path in config["wipe"]:
            if not os.path.basename(path).startswith("agentgym-"):
                raise SystemExit(f"{path!r} is not a folder of ours to wipe")
    host = connect(config)
    if "network" in config:
        hand_over(WIRE_IN, config["network"])
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
