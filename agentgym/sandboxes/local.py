"""Boxes without Docker: bubblewrap's namespaces, or a plain process where that is asked for by name."""

import asyncio
import functools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.boxes import Boxes
from agentgym.errors import SandboxError
from agentgym.process_identity import new_folder, remove_folder, sweep_folders
from agentgym.sandboxes import seccomp
from agentgym.sandboxes.box import RemoteBox
from agentgym.sandboxes.faults import finished
from agentgym.sandboxes.pool import open_pool
from agentgym.sandboxes.server_files import SERVER, image_folder, server_digest, server_files
from agentgym.sandboxes.wire import Wire

END_S = 3.0
BRANCHES = "/branches"
"""The folder inside a box that holds the working folders of forked sessions."""
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
            "NPROC": self.pids,
            "NOFILE": 512,
            "FSIZE": self.disk_mb << 20,
            "CORE": 0,
        }
        wipe = ["/tmp", BRANCHES, "/dev/shm", "/dev/mqueue"]
        config = {"work": "/tmp", "branches": BRANCHES, "wipe": wipe, "limits": limits}
        with ExitStack() as stack:
            server = {name: stack.enter_context(memory_file(text)).fileno() for name, text in server_files().items()}
            calls = stack.enter_context(memory_file(seccomp.program())).fileno()
            return await start_server(
                [*self._command(server, calls), *_interpreter(self.python), SERVER],
                config,
                digest=f"bubblewrap:{server_digest()}",
                keep=[*server.values(), calls],
                held=stack,
            )

    def _command(self, server: Mapping[str, int], calls: int) -> list[str]:
        interpreter = _interpreter(self.python)[0]
        return [*_drop_root(), *_bwrap(interpreter, self.disk_mb << 20, server, calls)]


@functools.cache
def why_no_bubblewrap() -> str | None:
    """Return the reason why bubblewrap boxes cannot run here; None where they can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (apt-get install bubblewrap)"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "setpriv is not installed (apt-get install util-linux)"
    try:
        program = seccomp.program()
    except SandboxError as error:
        return str(error)
    with memory_file(program) as calls:
        command = Bubblewrap()._command({}, calls.fileno())
        probe = subprocess.run([*command, "true"], capture_output=True, text=True, pass_fds=[calls.fileno()])
    return None if probe.returncode == 0 else f"bwrap cannot make a box: {probe.stderr.strip()[-300:]}"


def _interpreter(python: str | None) -> list[str]:
    system = "/usr/bin/python3"
    return [python or (system if Path(system).exists() else os.path.realpath(sys.executable)), "-I", "-S", "-B"]


def _drop_root() -> list[str]:
    """The command that makes root nobody first: root's files stay closed, and the process limit holds."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]


def _bwrap(interpreter: str, disk_bytes: int, server: Mapping[str, int], calls: int) -> list[str]:
    size = str(disk_bytes)
    # /dev and / are file systems in memory too: left writable, they would carry files past a reset.
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1"),
        *("--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "box"),
        *("--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "USER", "nobody", "--setenv", "LANG", "C.UTF-8", "--setenv", "TMPDIR", "/tmp"),
        *_read_only(interpreter),
        *(
            "--proc",
            "/proc",
            "--ro-bind",
            "/proc/sys",
            "/proc/sys",
            "--dev",
            "/dev",
            "--size",
            size,
            "--tmpfs",
            "/dev/shm",
            "--mqueue",
            "/dev/mqueue",
        ),
        *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", BRANCHES, "--seccomp", str(calls)),
        # As data: the user that the box runs as may not be able to reach the folder of this package.
        *(word for name, fd in server.items() for word in ("--ro-bind-data", str(fd), f"{SERVER}/{name}")),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"),
    ]


def _read_only(interpreter: str) -> list[str]:
    """The mounts of the host's programs and libraries, and of the few files of /etc that they need."""
    binds = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            binds += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            binds += ["--ro-bind", str(path), str(path)]
    for name in ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "passwd", "group", "ssl"):
        binds += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if not interpreter.startswith("/usr/"):
        prefix = str(Path(interpreter).resolve().parents[1])
        binds += ["--ro-bind", prefix, prefix]
    return binds


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
                [*command, json.dumps({**config, "fd": theirs.fileno()})],
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
        try:
            wire = await Wire.over(ours)
            return await _first_word(wire, digest, ending)
        except BaseException as error:
            ours.close()
            await ending()
            if isinstance(error, SandboxError):
                errors.seek(0)
                said = errors.read(2000).decode("utf-8", "replace").strip()
                raise SandboxError(f"{error}{f': {said}' if said else ''}") from error.__cause__
            raise


async def _first_word(wire: Wire, digest: str, ending: Any) -> RemoteBox:
    try:
        return await RemoteBox.open(wire, digest=digest, end=ending)
    except BaseException:
        wire.close()
        raise


async def _end(process: "subprocess.Popen[bytes]", scratch: Sequence[str]) -> None:
    """Wait until the server has ended, and kill it where it does not; its wire is cut already."""
    if process.poll() is None and not await _exits(process.pid, END_S):
        process.kill()
        await finished(asyncio.ensure_future(asyncio.to_thread(process.wait)))
    process.poll()
    if scratch:
        await finished(asyncio.ensure_future(asyncio.to_thread(_remove, scratch)))


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        remove_folder(folder)


def _settle(gone: "asyncio.Future[None]") -> None:
    if not gone.done():
        gone.set_result(None)


async def _exits(pid: int, timeout_s: float) -> bool:
    """Whether the child ends within `timeout_s`; False where no descriptor is left to watch it."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    loop.add_reader(fd, _settle, gone)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(gone, timeout_s)
            return True
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)
