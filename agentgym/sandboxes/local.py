"""Boxes without Docker: bubblewrap's namespaces, or a plain process where that is asked for by name."""

import asyncio
import functools
import itertools
import json
import logging
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.boxes import Boxes
from agentgym.errors import SandboxError
from agentgym.process_identity import new_folder, remove_folder, sweep_folders
from agentgym.sandboxes import seccomp
from agentgym.sandboxes.box import RemoteBox
from agentgym.sandboxes.faults import exits, finished
from agentgym.sandboxes.link import WhyItEnded
from agentgym.sandboxes.pool import open_pool
from agentgym.sandboxes.server_files import (
    BOX_KILLED,
    BRANCHES,
    SERVER,
    SERVERS,
    arena,
    box_files,
    image_folder,
    server_digest,
)
from agentgym.sandboxes.wire import Wire

END_S = 3.0
PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64")
SETTINGS = ("alternatives", "ld.so.conf.d", "ssl")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
BOX_USERS = range(200_000, 265_536)
"""The users of this machine as whom the boxes of root run, one after the other; they own nothing."""
_boxes = itertools.count(secrets.randbelow(len(BOX_USERS)))
_log = logging.getLogger("agentgym.sandboxes")


@dataclass(frozen=True, kw_only=True)
class Bubblewrap:
    """Boxes in namespaces of their own: no network, no host processes, the host's /usr read-only.

    `memory_mb` and `disk_mb` bound one process and one folder: unlike with Docker, nothing bounds a
    box's total memory. System calls are filtered by sandbox/seccomp.json. It needs bubblewrap 0.8 or newer
    and user namespaces. See sandbox/README.md.
    """

    memory_mb: int = 512
    disk_mb: int = 128
    pids: int = 128
    python: str | None = None
    """The Python inside the box; None takes /usr/bin/python3, else the one that runs this."""

    def open(self, size: int) -> AbstractAsyncContextManager[Boxes]:
        """Open a pool of at most `size` boxes, each started by its first lease in some 60 ms."""
        return open_pool(self._start, size)

    async def _start(self) -> RemoteBox:
        limits = {
            "AS": self.memory_mb << 20,
            "NPROC": self.pids + SERVERS,
            "SIGPENDING": 1024,
            "MSGQUEUE": 256 << 10,
            "NOFILE": 512,
            "FSIZE": self.disk_mb << 20,
            "CORE": 0,
        }
        wipe = ["/tmp", BRANCHES, "/dev/shm", "/dev/mqueue"]
        config = {"work": "/tmp", "branches": BRANCHES, "wipe": wipe, "limits": limits}
        config |= {"filter": seccomp.filters(), "arena": arena(self.disk_mb, shared=_shared())}
        with ExitStack() as stack:
            files = {path: stack.enter_context(memory_file(text)).fileno() for path, text in box_files().items()}
            return await start_server(
                [*self._command(files), *_interpreter(self.python), SERVER],
                config,
                digest=f"bubblewrap:{server_digest()}",
                keep=list(files.values()),
                held=stack,
            )

    def _command(self, files: Mapping[str, int]) -> list[str]:
        interpreter = _interpreter(self.python)[0]
        return [*_drop_root(), *_bwrap(interpreter, self.disk_mb << 20, files)]


@functools.cache
def why_no_bubblewrap() -> str | None:
    """Return the reason why bubblewrap boxes cannot run here; None where they can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (apt-get install bubblewrap)"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "setpriv is not installed (apt-get install util-linux)"
    try:
        seccomp.program()
    except SandboxError as error:
        return str(error)
    probe = subprocess.run([*Bubblewrap()._command({}), "true"], capture_output=True, text=True)
    return None if probe.returncode == 0 else f"bwrap cannot make a box: {probe.stderr.strip()[-300:]}"


def _interpreter(python: str | None) -> list[str]:
    system = "/usr/bin/python3"
    return [python or (system if Path(system).exists() else os.path.realpath(sys.executable)), "-I", "-S", "-B"]


def _drop_root() -> list[str]:
    """The command that makes root a user of no other box first: what one box uses up is missing in no other.

    Root's files stay closed, and the process limit holds.
    """
    if os.geteuid() != 0:
        return []
    user = str(BOX_USERS[next(_boxes) % len(BOX_USERS)])
    return ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"]


def _bwrap(interpreter: str, disk_bytes: int, files: Mapping[str, int]) -> list[str]:
    """The command up to the program; what bubblewrap mounts in memory serves where an episode's own place cannot."""
    memory = ("--size", str(disk_bytes), "--tmpfs")
    # /dev and / are file systems in memory too: left writable, they would carry files past a reset.
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1", "--new-session"),
        # In the box's own user namespace only, and for its keeper alone: what runs code has none.
        *("--cap-add", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "box"),
        *("--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "USER", "nobody", "--setenv", "LANG", "C.UTF-8", "--setenv", "TMPDIR", "/tmp"),
        *_read_only(interpreter),
        *("--proc", "/proc", "--tmpfs", "/dev"),
        *(word for name in DEVICES for word in ("--dev-bind-try", f"/dev/{name}", f"/dev/{name}")),
        *(word for name, to in LINKS.items() for word in ("--symlink", to, f"/dev/{name}")),
        *("--dir", "/dev/pts", "--mqueue", "/dev/mqueue"),
        *(word for path in ("/dev/shm", "/tmp", BRANCHES) for word in (*memory, path)),
        # As data: the user that the box runs as may not be able to reach the folder of this package.
        *(word for path, fd in files.items() for word in ("--ro-bind-data", str(fd), path)),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"),
    ]


def _shared() -> list[str]:
    """Return the folders of the host that a box sees."""
    below = [f"/{name}" for name in PROGRAMS] + [f"/etc/{name}" for name in SETTINGS]
    return ["/usr", *(path for path in below if Path(path).is_dir() and not Path(path).is_symlink())]


def _read_only(interpreter: str) -> list[str]:
    """The mounts of the host's programs and libraries, and of the few folders of /etc that they need."""
    binds = ["--ro-bind", "/usr", "/usr"]
    for name in PROGRAMS:
        path = Path("/", name)
        if path.is_symlink():
            binds += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            binds += ["--ro-bind", str(path), str(path)]
    for name in SETTINGS:
        binds += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if not interpreter.startswith("/usr/"):
        prefix = _prefix(interpreter)
        binds += ["--ro-bind", prefix, prefix]
    return binds


def _prefix(interpreter: str) -> str:
    """Return the folder that an interpreter needs; SandboxError where a user's own files may lie in it."""
    prefix = Path(interpreter).resolve().parents[1]
    homes = [Path(user.pw_dir) for user in pwd.getpwall() if user.pw_uid == 0 or user.pw_uid >= 1000]
    if prefix == Path("/") or any(home.is_relative_to(prefix) for home in homes if home != Path("/nonexistent")):
        raise SandboxError(
            f"python: {interpreter!r} would show all of {str(prefix)!r} to the code in the box, and a user's home is "
            "in it; install that Python into a folder of its own, such as /opt/python"
        )
    return str(prefix)


@dataclass(frozen=True, kw_only=True)
class Process:
    """Boxes without protection: plain processes of this user, which reach this user's files, network and processes.

    Limits of time, memory and output hold against mistakes; nothing holds against intent.
    """

    unsafe: bool = False
    memory_mb: int = 1024

    def __post_init__(self) -> None:
        if not self.unsafe:
            raise ValueError(
                "unsafe: a plain process isolates nothing (files, network and processes of this user are open to "
                "the model's code); use Bubblewrap or Docker, or say Process(unsafe=True)"
            )

    def open(self, size: int) -> AbstractAsyncContextManager[Boxes]:
        """Open a pool of at most `size` processes, each with a private working folder."""
        _warn_once()
        return self._open(size)

    @asynccontextmanager
    async def _open(self, size: int) -> AsyncIterator[Boxes]:
        async def sweep() -> None:
            await asyncio.to_thread(sweep_folders)

        await sweep()
        async with open_pool(self._start, size, sweep) as pool:
            yield pool

    async def _start(self) -> RemoteBox:
        work, branches = (str(new_folder(name)) for name in ("box", "branches"))
        limits = {"AS": self.memory_mb << 20, "NOFILE": 512, "CORE": 0}
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": work,
            "TMPDIR": work,
            "LANG": "C.UTF-8",
        }
        try:
            return await start_server(
                [*_interpreter(sys.executable), str(image_folder() / "server")],
                {"work": work, "branches": branches, "wipe": [work, branches], "limits": limits},
                digest=f"process:{server_digest()}",
                environment=environment,
                scratch=[work, branches],
            )
        except BaseException:
            _remove([work, branches])
            raise


@functools.cache
def _warn_once() -> None:
    _log.warning("unsafe boxes: the model's code runs as this user, with nothing between it and this machine")


def memory_file(content: bytes) -> Any:
    """Return a file that exists in memory only, open at its start."""
    file = os.fdopen(os.memfd_create("agentgym"), "w+b")
    file.write(content)
    file.seek(0)
    return file


async def start_server(
    command: Sequence[str],
    config: Mapping[str, object],
    *,
    digest: str,
    environment: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
    held: ExitStack | None = None,
    scratch: Sequence[str] = (),
) -> RemoteBox:
    """Start a server with one end of a socket pair as its wire; SandboxError with its error output where it fails.

    It inherits the descriptors `keep`; `held` is closed as soon as it has them, before its first word is waited for:
    a hundred boxes that start at once hold no more files than one.
    """
    with memory_file(b"") as errors:
        ours, theirs = socket.socketpair()
        try:
            # In the loop's thread on purpose: --die-with-parent means the thread that forked.
            process = subprocess.Popen(  # noqa: ASYNC220
                [*command, json.dumps({**config, "ends": [theirs.fileno()]})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                pass_fds=[theirs.fileno(), *keep],
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"the box did not start: {error}") from error
        finally:
            theirs.close()
            if held is not None:
                held.close()
        ending = functools.partial(_end, process, scratch)
        why_it_ended = functools.partial(_why_it_ended, process, open_to_signals=bool(scratch))
        try:
            wire = await Wire.over(ours)
            return await _first_word(wire, digest, ending, why_it_ended)
        except BaseException as error:
            ours.close()
            await ending()
            if isinstance(error, SandboxError):
                errors.seek(0)
                said = errors.read(2000).decode("utf-8", "replace").strip()
                raise SandboxError(f"{error}{f': {said}' if said else ''}") from error.__cause__
            raise


async def _first_word(wire: Wire, digest: str, ending: Any, why_it_ended: WhyItEnded) -> RemoteBox:
    try:
        return await RemoteBox.open(wire, digest=digest, end=ending, why_it_ended=why_it_ended)
    except BaseException:
        wire.close()
        raise


async def _why_it_ended(process: "subprocess.Popen[bytes]", *, open_to_signals: bool) -> str | None:
    """How the code in a box ended it; None where it goes on, or the machine or this client ended it.

    `open_to_signals` is whether the code can kill the server: then whatever ended it is put down to the code.
    """
    if process.poll() is None and not await exits(process.pid, END_S):
        return None
    code = process.poll()
    if code == BOX_KILLED or (open_to_signals and code):
        return f"its server ended with code {code}"
    return None


async def _end(process: "subprocess.Popen[bytes]", scratch: Sequence[str]) -> None:
    """Wait until the server has ended, and kill it where it does not; its wire is cut already."""
    if process.poll() is None and not await exits(process.pid, END_S):
        process.kill()
        await finished(asyncio.ensure_future(asyncio.to_thread(process.wait)))
    process.poll()
    if scratch:
        await finished(asyncio.ensure_future(asyncio.to_thread(_remove, scratch)))


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        remove_folder(folder)
