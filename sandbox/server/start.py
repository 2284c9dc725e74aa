"""The server's start: it connects to the host, prepares to be forked (a zygote), and lets a supervisor serve."""

from __future__ import annotations

import binascii
import fcntl
import gc
import json
import os
import signal
import site
import socket
import sys
import types

from .arena import Arena, hold_proc
from .bounds import Bounds, FirstToDie, give_up_capabilities
from .children import QUIET, Exits, close_from
from .counters import OomCounter, Places
from .frames import Wire
from .keeper import FIRST, IN_A_PLACE, NOT_PLACED, Pipe, keep
from .kernel import drop_bounding
from .limits import (
    ALONE,
    FOLDER,
    PACKAGE,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    PROC,
    PROTOCOL,
    RESET,
    SANDBOX_KILLED,
    WIRE_IN,
    WIRE_OUT,
    libc,
)
from .network import hand_over
from .space import Space
from .supervisor import Supervisor

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any, NoReturn


def connect(config: dict[str, Any]) -> Wire:
    """Return the host's connection, on the lowest descriptors.

    The connection is either inherited, or made to the configured socket, or consists of our standard input and output.
    """
    if "ends" in config:
        ends = config["ends"]
    elif "connect" in config:
        socket_ = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        socket_.connect(config["connect"])
        ends = [socket_.detach()]
    else:
        ends = [0, 1]
    # Copy them to higher numbers first, because one end may have the number that another one is to get.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, PROC + 1) for fd in ends]
    held = [WIRE_IN, WIRE_OUT][: len(ends)]
    for copy, fd in zip(copies, held):
        os.dup2(copy, fd, inheritable=False)
        os.set_blocking(fd, True)
    close_from(held[-1] + 1)
    hold_proc()
    return Wire(held[0], held[-1])


def prepare(config: dict[str, Any]) -> None:
    """Prepare this process to be forked (as a zygote), and make its memory inaccessible to its children."""
    Bounds.nice = config.get("nice", 0)
    Bounds.filter = binascii.a2b_base64(config.get("filter", {}).get(os.uname().machine, ""))
    FirstToDie.watch()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):  # Early errors go to stderr, which the host reads until our first message.
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
    # By path instead of `site.main`, so that no .pth file and no sitecustomize runs.
    sys.path += [path for path in site.getsitepackages() if path not in sys.path and os.path.isdir(path)]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    gc.collect()
    gc.freeze()
    gc.disable()


def forget_package() -> None:
    """Hide the server's modules from `import`: code in the sandbox may have modules named `files` or `server`."""
    above = os.path.dirname(FOLDER.rstrip("/"))
    sys.path[:] = [path for path in sys.path if path and path != above]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "__main__"]
    KEPT.extend(sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == PACKAGE)


KEPT: list[types.ModuleType] = []
"""The only references to the server's modules, which keep them alive."""


def main() -> NoReturn:
    config = json.loads(sys.argv[1])
    if not ALONE:
        for path in config["wipe"]:
            if not os.path.basename(path).startswith("agentgym-"):
                raise SystemExit(f"{path!r} is not one of our folders, so it can't be wiped")
    host = connect(config)
    if "network" in config:  # Only once: a program that replaces this one has no sockets.
        hand_over(WIRE_IN, config.pop("network"))
    arena = make_arena(host, config)
    prepare(config)
    os.chdir("/")
    oom, places = OomCounter(), Places(config.get("reserve", 0))
    if arena is None and ALONE:
        serve_in_place(host, config, oom, places)

    if arena is not None:
        drop_bounding()  # For all processes forked from now on.

    def supervise(begin: Pipe, placed: Pipe, ended: Pipe) -> NoReturn:
        serve_episode(host, config, oom, places, arena, begin, placed, ended)

    keep(arena, supervise)


def make_arena(host: Wire, config: dict[str, Any]) -> Arena | None:
    """Return the object that creates each episode's namespaces, or None if episodes are reset in place."""
    if config.get("arena") is None:
        return None
    try:
        return Arena(config)
    except OSError as error:
        # Start a new program, to get rid of a half-finished setup.
        start_again(host, config | {"arena": None, "why_in_place": f"{error.filename}: {error.strerror}"})


def start_again(host: Wire, config: dict[str, Any]) -> NoReturn:
    """Replace this program with a new one that keeps only the configuration and the host's connection."""
    config["ends"] = sorted({host.fd, host.outlet})
    for fd in config["ends"]:
        os.set_inheritable(fd, True)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", FOLDER.rstrip("/"), json.dumps(config)])


def first_word(host: Wire, word: int, said: dict[str, Any]) -> None:
    """Answer the reset that starts an episode, or send the hello before the first episode, which has no reset."""
    os.dup2(0, 2)
    if word == FIRST:
        host.write({"hello": PROTOCOL, "python": sys.version.split()[0], **said})
    else:
        host.write({"id": word, "clean": True})


def serve_episode(
    host: Wire,
    config: dict[str, Any],
    oom: OomCounter,
    places: Places,
    arena: Arena | None,
    begin: Pipe,
    placed: Pipe,
    ended: Pipe,
) -> NoReturn:
    """Be the supervisor of one episode.

    It prepares, waits for the end of the previous episode, enters new namespaces, and serves.
    """

    def begin_anew(call: int) -> NoReturn:
        ended.say(call)
        os._exit(RESET)

    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    FirstToDie.watch()
    Space.begin()
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = Supervisor(host, config, begin_anew, oom, places, arena)
    if begin.hear() is None:
        os._exit(0)
    word = ended.hear()
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # Our keeper must be able to open our namespace; no code is alive now.
    if arena is not None:
        arena.enter()
    placed.say(NOT_PLACED if arena is None else IN_A_PLACE)
    supervisor.begin()
    if word is not None and begin.hear() is not None:
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        os.close(begin.out)
        os.close(placed.into)
        first_word(
            host, word, {"place": "old"} if arena is None else {"place": "new", "not_private": arena.not_private}
        )
        serve(supervisor)
    os._exit(0)


def serve_in_place(host: Wire, config: dict[str, Any], oom: OomCounter, places: Places) -> NoReturn:
    """Be the supervisor of all episodes; each starts with a new program, so its memory has nothing of earlier ones."""

    def begin_anew(call: int) -> NoReturn:
        start_again(host, config | {"word": call})

    give_up_capabilities()
    supervisor = Supervisor(host, config, begin_anew, oom, places)
    supervisor.begin()
    first_word(host, config.get("word", FIRST), {"place": "old", "why": config.get("why_in_place", "")})
    serve(supervisor)


def serve(supervisor: Supervisor) -> NoReturn:
    """Serve until the host closes the connection, and exit with code 0.

    At any other end, the exit code tells the host that something inside the sandbox ended it.
    """
    code = SANDBOX_KILLED
    try:
        supervisor.serve()
    except (EOFError, BrokenPipeError):
        code = 0  # The host is gone.
    finally:
        try:
            supervisor.leave()
        finally:
            os._exit(code)
