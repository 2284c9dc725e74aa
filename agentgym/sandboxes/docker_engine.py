"""One Docker engine: containers created, started, connected to, swept and removed, a few at a time."""

import asyncio
import functools
import itertools
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from agentgym.errors import SandboxError, WireError
from agentgym.process_identity import is_dead, new_folder, owner, sweep_folders
from agentgym.sandboxes.box import START_S, RemoteBox
from agentgym.sandboxes.docker_attach import attach
from agentgym.sandboxes.docker_client import EngineDown, EngineFailed, connect, translated
from agentgym.sandboxes.docker_image import default_image, image_digest
from agentgym.sandboxes.docker_settings import DockerSettings
from agentgym.sandboxes.faults import finished
from agentgym.sandboxes.link import WhyItEnded
from agentgym.sandboxes.local import END_S
from agentgym.sandboxes.seccomp import filters, profile
from agentgym.sandboxes.server_files import BOX_KILLED, BRANCHES, SERVERS, arena
from agentgym.sandboxes.wire import Wire

if TYPE_CHECKING:
    import docker


OPERATIONS_AT_ONCE = 8
NOBODY = "65534:65534"
INSIDE = "/run/agentgym"
UNMASKED: dict[str, Any] = {"MaskedPaths": [], "ReadonlyPaths": []}
"""A kernel shows a new namespace its processes only where all of /proc is seen: the server masks it for the code."""
GVISOR_MB, GVISOR_PIDS = 256, 1024
_log = logging.getLogger("agentgym.sandboxes")
P = ParamSpec("P")
T = TypeVar("T")


async def _first_word(wire: Wire, digest: str, end: Callable[[], Any], why_it_ended: WhyItEnded) -> RemoteBox:
    try:
        return await RemoteBox.open(wire, digest=digest, end=end, why_it_ended=why_it_ended)
    except SandboxError as error:
        wire.close()
        raise EngineFailed(str(error)) from error
    except BaseException:
        wire.close()
        raise


def _listener(path: Path) -> socket.socket:
    """A socket that the container's user may connect to; the folder above the mounted one keeps others out."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener = socket.socket(socket.AF_UNIX)
    except OSError:
        os.close(folder)
        raise
    try:
        # Through the descriptor: a socket's address holds 107 bytes, and TMPDIR may be longer.
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        path.chmod(0o666)
        listener.listen(1)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


def server_config(spec: DockerSettings, *, connected: bool) -> dict[str, Any]:
    """The configuration of the server inside: its folders, each process's limits, and the place of its wire.

    That is a socket in the mounted folder where `connected`, else its own input and output.
    """
    limits = {"NOFILE": 512, "CORE": 0}
    if spec.runtime == "runsc":  # Past the container's own limits gVisor itself would end, and the box with it.
        limits |= {"AS": spec.memory_mb << 20, "NPROC": spec.pids}
    else:
        limits |= {"SIGPENDING": 1024, "MSGQUEUE": 256 << 10}
    wipe = ["/tmp", BRANCHES, "/dev/shm", "/dev/mqueue"]
    config: dict[str, Any] = {"work": "/tmp", "branches": BRANCHES, "wipe": wipe, "limits": limits}
    if spec.runtime != "runsc":  # Which lets nobody make a namespace; gVisor's own kernel answers all calls.
        config |= {"filter": filters(network=spec.network != "none"), "arena": arena(spec.disk_mb, users=True)}
    return config | ({"connect": f"{INSIDE}/box.sock"} if connected else {})


def container_limits(spec: DockerSettings) -> dict[str, Any]:
    """The container's limits, in the form that the docker package takes."""
    from docker.types import LogConfig

    gvisor = spec.runtime == "runsc"
    memory_bytes = spec.memory_mb + (GVISOR_MB if gvisor else 0) << 20
    memory = f"rw,exec,nosuid,nodev,mode=1777,size={spec.disk_mb}m"
    return {
        "runtime": spec.runtime,
        "network_mode": spec.network,
        "read_only": True,
        "tmpfs": {"/tmp": memory, BRANCHES: memory},
        "shm_size": spec.disk_mb << 20,
        "ipc_mode": "private",
        "mem_limit": memory_bytes,
        "memswap_limit": memory_bytes,
        "nano_cpus": int(spec.cpus * 1e9),
        "pids_limit": max(spec.pids, GVISOR_PIDS) if gvisor else spec.pids + SERVERS,
        "cap_drop": ["ALL"],
        "security_opt": [
            "no-new-privileges:true",
            f"seccomp={profile(network=spec.network != 'none', keeper=not gvisor)}",
        ],
        "log_config": LogConfig(type="none"),
    }


class Engine:
    """One client of an engine with threads of its own; at most 8 operations and 8 starts are in flight.

    Every container carries who owns it: what a killed client left is removed by the next one's sweep.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.boxes = 0
        self.down_until = 0.0
        self._threads = ThreadPoolExecutor(OPERATIONS_AT_ONCE, thread_name_prefix="agentgym-docker")
        self._starting = asyncio.Semaphore(OPERATIONS_AT_ONCE)
        self._owner = owner()
        self._run = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._names: set[str] = set()
        self._digest: str | None = None
        self._folder = new_folder("run")

    @functools.cached_property
    def _client(self) -> "docker.APIClient":
        return connect(host=self.host)

    async def do(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking operation in this engine's threads; errors of engine and connection are SandboxError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(translated, operation, *args, **kwargs))

    async def prepare(self, spec: DockerSettings) -> None:
        """Remove what dead processes left, and look for the image."""
        await self.do(self.sweep)
        await self.digest(spec)

    async def digest(self, spec: DockerSettings) -> str:
        """The id of the image that the engine has under its name."""
        if self._digest is None:
            self._digest = await self.do(lambda: image_digest(self._client, spec.image or default_image()))
        return self._digest

    async def start(self, spec: DockerSettings) -> RemoteBox:
        """Start a box; nothing is left of one that failed to start or was cancelled."""
        async with self._starting:
            digest = await self.digest(spec)
            name = f"agentgym-{self._run}-{next(self._numbers)}"
            self._names.add(name)
            self.boxes += 1
            try:
                if not self.host.startswith("unix://"):
                    return await self._start_attached(spec, name, digest)
                return await self._start_connected(spec, name, digest)
            except BaseException:
                await self.end(name)
                raise

    async def _start_connected(self, spec: DockerSettings, name: str, digest: str) -> RemoteBox:
        folder = self.new_folder()
        end = functools.partial(self.end, name, folder)
        with _listener(folder / "box.sock") as listener:
            try:
                # The thread cannot be cancelled: a cancelled start is waited for and undone.
                await finished(asyncio.ensure_future(self.do(self.create, spec, name, folder)))
                await finished(asyncio.ensure_future(self.do(self._client.start, name)))
                connection = await self.connection(listener, name)
                why_it_ended = functools.partial(self.why_it_ended, spec, name)
                return await _first_word(await Wire.over(connection), digest, end, why_it_ended)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    async def _start_attached(self, spec: DockerSettings, name: str, digest: str) -> RemoteBox:
        await finished(asyncio.ensure_future(self.do(self.create, spec, name, None)))
        try:
            wire = await attach(self.host, name)
        except (OSError, TimeoutError, WireError) as error:
            raise EngineDown(f"the Docker engine at {self.host} does not attach: {error}") from error
        try:
            await finished(asyncio.ensure_future(self.do(self._client.start, name)))
        except BaseException:
            wire.close()
            raise
        end, why_it_ended = functools.partial(self.end, name), functools.partial(self.why_it_ended, spec, name)
        return await _first_word(wire, digest, end, why_it_ended)

    def new_folder(self) -> Path:
        """A folder to mount into one container."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        folder.chmod(0o755)
        return folder

    def create(self, spec: DockerSettings, name: str, folder: Path | None) -> None:
        """A container, not started; its wire is a socket in `folder`, or, where that is None, its input and output."""
        client = self._client
        client.create_container(
            spec.image or default_image(),
            command=[json.dumps(server_config(spec, connected=folder is not None))],
            name=name,
            stdin_open=folder is None,
            user=NOBODY,
            hostname="box",
            network_disabled=spec.network == "none",
            labels={
                "agentgym.owner": self._owner,
                "agentgym.run": self._run,
                "agentgym.created": str(int(time.time())),
            },
            host_config=client.create_host_config(
                binds=[] if folder is None else [f"{folder}:{INSIDE}:ro"], **container_limits(spec)
            )
            | UNMASKED,
        )

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
                    raise EngineFailed(
                        f"the box did not start: its container is {state['Status']}, "
                        f"exit code {state['ExitCode']} {state['Error']}"
                    ) from None

    async def why_it_ended(self, spec: DockerSettings, name: str) -> str | None:
        """How the code in a box ended it; None where its container goes on or is gone, or its engine does not say."""
        deadline = asyncio.get_running_loop().time() + END_S
        try:
            while (state := await self.do(self._state, name))["Running"]:
                if asyncio.get_running_loop().time() > deadline:
                    return None
                await asyncio.sleep(0.05)
        except SandboxError:
            return None
        code = state["ExitCode"]
        if state["OOMKilled"]:
            return "it used up the memory of its container"
        # Under gVisor the code can kill its server; under runc a signal to it comes from outside.
        if code == BOX_KILLED or (spec.runtime == "runsc" and code):
            return f"its container ended with code {code}"
        return None

    async def end(self, name: str, folder: Path | None = None) -> None:
        """Remove the container; what is gone already is no error, and what cannot be removed is left for a sweep."""
        if name not in self._names:
            return
        self._names.discard(name)
        self.boxes -= 1
        try:
            await finished(asyncio.ensure_future(self.do(self._remove, name)))
        except SandboxError as error:
            # As text: a log that keeps the error keeps the frames below it, and the sockets in them.
            _log.warning("a container is left for the next sweep: %s", str(error))
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Remove what this process still has, and end the threads."""
        try:
            with suppress(SandboxError):
                await asyncio.shield(self.do(self._remove_run))
        finally:
            self._threads.shutdown(wait=False)
            shutil.rmtree(self._folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove containers and folders of dead processes of this machine, and what is left of this process's own."""
        for container in self._labelled("agentgym.owner"):
            ours = container["Labels"].get("agentgym.run") == self._run
            known = container["Names"][0].lstrip("/") in self._names if container["Names"] else False
            ended = container["State"] in ("exited", "dead")
            if (ours and (ended or not known)) or is_dead(container["Labels"]["agentgym.owner"]):
                self._remove(container["Id"])
        sweep_folders()

    def _remove_run(self) -> None:
        if "_client" not in self.__dict__:
            return
        try:
            for container in self._labelled(f"agentgym.run={self._run}"):
                self._remove(container["Id"])
        finally:
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
