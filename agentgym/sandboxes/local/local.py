"""Sandboxes without Docker: bubblewrap's namespaces, or a plain process if selected by name."""

import asyncio
import functools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import field
from typing import Any, ClassVar

from agentgym.config_fields import Name, Positive, Words, config
from agentgym.errors import SandboxError
from agentgym.machine.process_identity import new_folder, sweep_folders
from agentgym.sandboxes import seccomp
from agentgym.sandboxes.docker.docker import Docker
from agentgym.sandboxes.docker.images.package_folder import package_binds
from agentgym.sandboxes.local.bubblewrap import bwrap, drop_root, interpreter_of, shared_folders
from agentgym.sandboxes.local.local_server import memory_file, remove_folders, start_server
from agentgym.sandboxes.network.modes import LOOPBACK, NONE, allow_of, proxy_environment, server_network
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.pool import open_pool
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.sandboxes.protocol.arguments import SandboxMemory, check_size
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.sandboxes.server_files import (
    BRANCHES,
    RESERVE,
    SERVER,
    SERVERS,
    arena,
    image_folder,
    sandbox_files,
    server_digest,
)
from agentgym.sandboxes.volumes import check_sockets, check_volumes

_log = logging.getLogger("agentgym.sandboxes")


@config(frozen=True, kw_only=True)
class Bubblewrap:
    """Sandboxes in separate namespaces: no network, no host processes, and the host's /usr read-only.

    `memory_mb` limits each process and `disk_mb` each folder; unlike with Docker, nothing limits a sandbox's total
    memory. System calls are filtered by sandbox/seccomp.json. This needs bubblewrap 0.8 or newer and user namespaces.
    See sandbox/README.md.
    """

    ELSEWHERE: ClassVar = (Docker,)
    memory_mb: SandboxMemory = 512
    disk_mb: Positive = 128
    pids: Positive = 128
    python: Name | None = None
    """Path of the Python inside the sandbox; None uses /usr/bin/python3, or else the running Python."""
    pip: Words = ()
    """Packages that code in the sandbox can import, installed once, when a pool of such sandboxes is first opened."""
    volumes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Folders and files of this machine, keyed by their path in the sandbox, where they are read-only."""
    network: str | Allow = NONE
    """What the sandbox may reach.

    "none" for no internet sockets at all, "loopback" for only itself, or `Allow(...)` for the listed hosts through a
    logging proxy.
    """

    def __post_init__(self) -> None:
        if self.python is not None and not (self.python.startswith("/") and os.access(self.python, os.X_OK)):
            raise ValueError(f"python: {self.python!r} is not the absolute path of an executable on this machine")
        if not isinstance(self.network, Allow) and self.network not in (NONE, LOOPBACK):
            raise ValueError(f'network: {self.network!r} is not "none", "loopback" or Allow(...)')
        check_volumes(self.volumes)

    def open(self, size: int) -> AbstractAsyncContextManager[SandboxPool]:
        """Open a pool of sandboxes, each of which is started in about 60 ms when it is first leased.

        Args:
            size: Maximum number of sandboxes leased at once.

        Raises:
            ValueError: If `size` is not an int of at least 1, or, when the `async with` block is entered, if a volume
                contains a socket.
            SandboxError: When the block is entered, if this machine can't create such sandboxes; the message says what
                is missing. In that case, nothing has been started.
        """
        check_size(size)
        return self._open(size)

    @asynccontextmanager
    async def _open(self, size: int) -> AsyncIterator[SandboxPool]:
        if (why_not := await asyncio.to_thread(why_no_bubblewrap)) is not None:
            raise SandboxError(f"bubblewrap sandboxes cannot run here: {why_not}")
        # Before the first lease, which has no time for this: it may take minutes.
        await asyncio.to_thread(self._prepare)
        async with open_pool(self._start, size) as pool:
            yield pool

    async def _start(self) -> RemoteSandbox:
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
        config: dict[str, Any] = {"work": "/tmp", "branches": BRANCHES, "wipe": wipe, "limits": limits}
        config["reserve"] = RESERVE
        config["filter"] = seccomp.filters(network=self.network != NONE)
        config["arena"] = arena(
            self.disk_mb,
            shared=[*shared_folders(), *self._bound()],
            networked=self.network != NONE,
            leads_out=isinstance(self.network, Allow),
        )
        if self.network != NONE:
            config["network"] = server_network(self.network)
        with ExitStack() as stack:
            given = sandbox_files(tuple(interpreter_of(self.python)))
            files = {path: stack.enter_context(memory_file(text)).fileno() for path, text in given.items()}
            return await start_server(
                [*self._command(files), *interpreter_of(self.python), SERVER],
                config,
                digest=f"bubblewrap:{server_digest()}",
                keep=list(files.values()),
                held=stack,
                allow=allow_of(self.network),
            )

    def _prepare(self) -> None:
        """Check the settings and prepare the files that all sandboxes of this spec share.

        Raises:
            SandboxError: If no sandbox can be created.
            ValueError: If a volume contains a socket.
        """
        check_sockets(self.volumes)
        self._command({})  # First: it refuses a Python that must not run, even here.
        sandbox_files(tuple(interpreter_of(self.python)))

    def _command(self, files: Mapping[str, int]) -> list[str]:
        interpreter = interpreter_of(self.python)[0]
        volumes = (word for inside, outside in self.volumes.items() for word in ("--ro-bind", outside, inside))
        extra = [*package_binds(self.pip, interpreter), *volumes]
        variables = proxy_environment(self.network).items()
        return [
            *drop_root(),
            *bwrap(interpreter, self.disk_mb << 20, files, extra),
            *(word for name, value in variables for word in ("--setenv", name, value)),
            "--",
        ]

    def _bound(self) -> list[str]:
        """Return the sandbox paths where packages and volumes of this machine are mounted."""
        packages = package_binds(self.pip, interpreter_of(self.python)[0])
        return [*packages[2:], *self.volumes]


def why_no_bubblewrap() -> str | None:
    """Return why bubblewrap sandboxes can't run here, or None if they can; only success is cached."""
    try:
        _check_bubblewrap()
    except SandboxError as error:
        return str(error)
    return None


@functools.cache  # A failure isn't cached: the machine may only have been full at that moment.
def _check_bubblewrap() -> None:
    """Create a sandbox that does nothing.

    Raises:
        SandboxError: If that fails; the message gives the reason in one line.
    """
    if shutil.which("bwrap") is None:
        raise SandboxError("bwrap is not installed (apt-get install bubblewrap)")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        raise SandboxError("setpriv is not installed (apt-get install util-linux)")
    seccomp.program()
    try:
        probe = subprocess.run([*Bubblewrap()._command({}), "true"], capture_output=True, text=True)
    except OSError as error:
        raise SandboxError(f"bwrap cannot be started: {error}") from error
    if probe.returncode:
        said = " ".join(probe.stderr.split())
        raise SandboxError(f"bwrap cannot create a sandbox: {said[-300:]}")


@config(frozen=True, kw_only=True)
class Process:
    """Sandboxes without protection: plain processes of this user.

    The code in them can reach the user's files, network and processes. Limits on time, memory and output protect
    against mistakes, but nothing protects against malicious code.
    """

    unsafe: bool = False
    memory_mb: Positive = 1024

    def __post_init__(self) -> None:
        if not self.unsafe:
            raise ValueError(
                "unsafe: a plain process isolates nothing (this user's files, network and processes are open to "
                "the model's code); use Bubblewrap or Docker, or set Process(unsafe=True)"
            )

    def open(self, size: int) -> AbstractAsyncContextManager[SandboxPool]:
        """Open a pool of processes, each with a private working folder.

        Args:
            size: Maximum number of processes leased at once.

        Raises:
            ValueError: If `size` is not an int of at least 1.
        """
        check_size(size)
        _warn_once()
        return self._open(size)

    @asynccontextmanager
    async def _open(self, size: int) -> AsyncIterator[SandboxPool]:
        async def sweep() -> None:
            await asyncio.to_thread(sweep_folders)

        await sweep()
        async with open_pool(self._start, size, sweep) as pool:
            yield pool

    async def _start(self) -> RemoteSandbox:
        work, branches = (str(new_folder(name)) for name in ("sandbox", "branches"))
        limits = {"AS": self.memory_mb << 20, "NOFILE": 512, "CORE": 0}
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": work,
            "TMPDIR": work,
            "LANG": "C.UTF-8",
        }
        try:
            return await start_server(
                [*interpreter_of(sys.executable), str(image_folder() / "server")],
                {"work": work, "branches": branches, "wipe": [work, branches], "limits": limits},
                digest=f"process:{server_digest()}",
                environment=environment,
                scratch=[work, branches],
            )
        except BaseException:
            remove_folders([work, branches])
            raise


@functools.cache
def _warn_once() -> None:
    _log.warning("unsafe sandboxes: the model's code runs as this user, without any isolation from this machine")
