"""Boxes in Docker containers: no network, read-only root, no capabilities, memory and processes bounded."""

import asyncio
import functools
import itertools
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from agentgym.errors import SandboxError
from agentgym.sandboxes.base import START_S, RemoteBox
from agentgym.sandboxes.local import server_digest
from agentgym.sandboxes.pool import open_pool
from agentgym.sandboxes.wire import Wire
from agentgym.types import Boxes

if TYPE_CHECKING:
    import docker

IMAGE = "agentgym-sandbox"
SERVER_LABEL = "agentgym.server"
BUILD = "python -m agentgym.sandboxes.image build"
OPERATIONS_AT_ONCE = 8
NOBODY = "65534:65534"
INSIDE = "/run/agentgym"
_log = logging.getLogger("agentgym.sandboxes")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Docker:
    """Boxes in containers of a local engine; what they stop and what they do not is in sandbox/README.md."""

    image: str = IMAGE
    memory_mb: int = 512
    """Of the whole box, its files in memory included."""
    disk_mb: int = 64
    cpus: float = 1.0
    pids: int = 128
    network: str = "none"
    """Any other name opens the box to that network of the engine."""

    def open(self, size: int) -> AbstractAsyncContextManager[Boxes]:
        """At most `size` containers, each started by its first lease in some 200 ms; all removed at the end."""
        return self._open(size)

    @asynccontextmanager
    async def _open(self, size: int) -> AsyncIterator[Boxes]:
        daemon = _Daemon()
        try:
            await daemon.do(daemon.sweep)
            digest = await daemon.do(daemon.image_digest, self.image)
            async with open_pool(functools.partial(self._start, daemon, digest), size) as pool:
                yield pool
        finally:
            await daemon.close()

    async def _start(self, daemon: "_Daemon", digest: str) -> RemoteBox:
        folder = daemon.new_folder()
        with _listener(folder / "box.sock") as listener:
            container = await self._create(daemon, folder)
            end = functools.partial(daemon.end, container, folder)
            try:
                connection = await daemon.connection(listener, container)
                wire = await Wire.over(connection)
                return await _first_word(wire, digest, end)
            except BaseException:
                await end()
                raise

    async def _create(self, daemon: "_Daemon", folder: Path) -> str:
        """Create and start; the thread cannot be cancelled, so a cancelled start is waited for and undone."""
        creating = asyncio.ensure_future(daemon.do(daemon.create, self, folder))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await daemon.end(await creating, folder)
            raise


async def _first_word(wire: Wire, digest: str, end: Callable[[], Any]) -> RemoteBox:
    try:
        return await RemoteBox.open(wire, digest=digest, end=end)
    except BaseException:
        wire.close()
        raise


def _listener(path: Path) -> socket.socket:
    """A socket that the container's user may connect to; the folder above the mounted one keeps others out."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(1)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class _Daemon:
    """One client of the local engine with threads of its own; at most 8 operations are in flight.

    Every container carries who owns it: what a killed client left is removed by the next one's sweep.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(OPERATIONS_AT_ONCE, thread_name_prefix="agentgym-docker")
        self._owner = owner()
        self._run = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._folder = Path(tempfile.mkdtemp(prefix=f"agentgym-run-{self._owner.replace('/', '_')}-"))

    @functools.cached_property
    def _client(self) -> "docker.APIClient":
        return connect()

    async def do(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking operation in our threads; the engine's and the connection's errors are SandboxError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(_translated, operation, *args, **kwargs))

    def new_folder(self) -> Path:
        """A folder to mount into one container."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        folder.chmod(0o755)
        return folder

    def image_digest(self, image: str) -> str:
        """The id of the image that the engine has under this name."""
        return image_digest(self._client, image)

    def create(self, spec: Docker, folder: Path) -> str:
        """The id of a new, started container."""
        from docker.types import LogConfig

        limits = {"NOFILE": 512, "CORE": 0}
        config = {"connect": f"{INSIDE}/box.sock", "work": "/tmp", "limits": limits}
        config["wipe"] = ["/tmp", "/dev/shm", "/dev/mqueue"]
        client = self._client
        container: str = client.create_container(
            spec.image,
            command=[json.dumps(config)],
            user=NOBODY,
            hostname="box",
            network_disabled=spec.network == "none",
            labels={
                "agentgym.owner": self._owner,
                "agentgym.run": self._run,
                "agentgym.created": str(int(time.time())),
            },
            host_config=client.create_host_config(
                binds=[f"{folder}:{INSIDE}:ro"],
                network_mode=spec.network,
                read_only=True,
                tmpfs={"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={spec.disk_mb}m"},
                shm_size=spec.disk_mb << 20,
                ipc_mode="private",
                mem_limit=spec.memory_mb << 20,
                memswap_limit=spec.memory_mb << 20,
                nano_cpus=int(spec.cpus * 1e9),
                pids_limit=spec.pids,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                log_config=LogConfig(type="none"),
            ),
        )["Id"]
        try:
            client.start(container)
        except BaseException:
            self._remove(container)  # A failed start leaves a container behind.
            raise
        return container

    async def connection(self, listener: socket.socket, container: str) -> socket.socket:
        """The one connection of the server inside; SandboxError as soon as the container has ended instead."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        while True:
            try:
                return (await asyncio.wait_for(loop.sock_accept(listener), 1.0))[0]
            except TimeoutError:
                state = await self.do(self._state, container)
                if not state["Running"] or loop.time() > deadline:
                    raise SandboxError(
                        f"the box did not start: its container is {state['Status']}, "
                        f"exit code {state['ExitCode']} {state['Error']}"
                    ) from None

    async def end(self, container: str, folder: Path) -> None:
        """Remove the container; what is gone already is no error."""
        try:
            await asyncio.shield(self.do(self._remove, container))
        except SandboxError as error:
            _log.warning("a container is left for the next sweep: %s", error)
        shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Remove what this run still has, and hand the threads back."""
        try:
            with suppress(SandboxError):
                await asyncio.shield(self.do(self._remove_run))
        finally:
            self._threads.shutdown(wait=False)
            shutil.rmtree(self._folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the containers and folders whose owner on this machine is dead."""
        for container in self._labelled("agentgym.owner"):
            if is_dead(container["Labels"]["agentgym.owner"]):
                self._remove(container["Id"])
        for folder in Path(tempfile.gettempdir()).glob("agentgym-run-*"):
            if is_dead(folder.name.removeprefix("agentgym-run-").rsplit("-", 1)[0].replace("_", "/")):
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_run(self) -> None:
        if "_client" in self.__dict__:
            for container in self._labelled(f"agentgym.run={self._run}"):
                self._remove(container["Id"])
            self._client.close()

    def _labelled(self, label: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._client.containers(all=True, filters={"label": label})
        return found

    def _state(self, container: str) -> dict[str, Any]:
        state: dict[str, Any] = self._client.inspect_container(container)["State"]
        return state

    def _remove(self, container: str) -> None:
        from docker.errors import APIError

        try:
            self._client.remove_container(container, v=True, force=True)
        except APIError as error:
            if error.status_code not in (404, 409):  # Gone, or being removed.
                raise


def _translated(operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it; SandboxError for what the engine refuses and for an engine that is not there."""
    try:
        from docker.errors import DockerException
        from requests.exceptions import RequestException
    except ImportError as error:
        raise SandboxError("the docker package is missing: pip install agentgym[docker]") from error
    try:
        return operation(*args, **kwargs)
    except (DockerException, RequestException) as error:
        raise SandboxError(f"the Docker engine: {error}") from error


def connect(timeout_s: int = 60) -> "docker.APIClient":
    """A client of the local engine; SandboxError for a remote one, whose containers see no socket of ours."""
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not address.startswith("unix://"):
        raise SandboxError(f"the Docker engine at {address} is remote; boxes need a local one")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix://"))
        except OSError as error:
            raise SandboxError(f"no Docker engine answers at {address}: {error.strerror or error}") from error
    import docker

    return docker.from_env(timeout=timeout_s).api


def image_digest(client: "docker.APIClient", image: str) -> str:
    """The image's id; SandboxError that says how to build it where it is missing or holds another server."""
    from docker.errors import ImageNotFound

    try:
        found = client.inspect_image(image)  # type: ignore[no-untyped-call]
    except ImageNotFound as error:
        raise SandboxError(f"the Docker engine has no image {image!r}: {BUILD}") from error
    server = (found["Config"]["Labels"] or {}).get(SERVER_LABEL)
    if server not in (None, server_digest()):
        raise SandboxError(f"the image {image!r} holds another server.py than this agentgym: {BUILD}")
    return str(found["Id"])


def why_no_docker(image: str = IMAGE) -> str | None:
    """Why Docker boxes cannot run here; None where they can."""

    def probe() -> None:
        client = connect(timeout_s=5)
        try:
            image_digest(client, image)
        finally:
            client.close()

    try:
        _translated(probe)
    except SandboxError as error:
        return str(error)
    return None


def owner() -> str:
    """This process, told apart from every other of this machine at any time: host/boot/pid/start."""
    pid = Path("/proc/self").readlink()
    return f"{socket.gethostname()}/{_boot()}/{pid}/{_started(str(pid))}"


def is_dead(who: str) -> bool:
    """Whether that owner has ended; False for what other machines own."""
    try:
        host, boot, pid, started = who.split("/")
    except ValueError:
        return False
    return host == socket.gethostname() and (boot != _boot() or _started(pid) != started)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: str) -> str | None:
    """When the process started, in the kernel's ticks; None where there is none."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
