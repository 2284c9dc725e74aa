"""One Docker engine: creates, starts, connects to, sweeps and removes containers, a few at a time."""

import asyncio
import functools
import itertools
import json
import logging
import secrets
import shutil
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from agentgym.errors import SandboxError, WireError
from agentgym.machine.finished import finished
from agentgym.machine.process_identity import new_folder, owner, sweep_folders
from agentgym.sandboxes.docker.attach import attach
from agentgym.sandboxes.docker.client import (
    EngineDown,
    EngineTraits,
    connect,
    engine_traits,
    podman_ulimits,
    translated,
)
from agentgym.sandboxes.docker.guard import Guard
from agentgym.sandboxes.docker.heartbeat import (
    DEAD_S,
    OWNER_LABEL,
    RUN_LABEL,
    Heart,
    Lookout,
    engine_time,
    remove_container,
    remove_volume,
    traces,
)
from agentgym.sandboxes.docker.images.names import INSIDE
from agentgym.sandboxes.docker.images.ready import ready_image
from agentgym.sandboxes.docker.sandbox_wire import accepted, first_word, listener, network_of
from agentgym.sandboxes.docker.settings import (
    GVISOR,
    DockerSettings,
    check_memory,
    container_limits,
    named_refusals,
    sandbox_user,
    server_config,
    system_calls,
)
from agentgym.sandboxes.local.local_server import END_S
from agentgym.sandboxes.network.modes import NONE, proxy_environment
from agentgym.sandboxes.network.sandbox_network import release
from agentgym.sandboxes.network.services import LABEL, Services, check_images
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.sandboxes.remote.wire import Wire
from agentgym.sandboxes.server_files import SANDBOX_KILLED
from agentgym.sandboxes.volumes import read_only_mounts

if TYPE_CHECKING:
    import docker


OPERATIONS_AT_ONCE = 8
UNMASKED: dict[str, Any] = {"MaskedPaths": [], "ReadonlyPaths": []}
"""Options that leave all of /proc visible; the server masks it for the code instead.

The kernel lets a new namespace mount /proc only if all of /proc is visible.
"""
_log = logging.getLogger("agentgym.sandboxes")
P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """One process's client of one Docker engine; blocking requests run in the client's own threads.

    At most 8 operations and 8 starts are in progress at once. Every container is labeled with the client's token, and
    the engine stores the client's heartbeat (see `heartbeat.py`). If this client is killed, the sweep of the next
    client can therefore find and remove its leftovers.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.sandboxes = 0
        self.down_until = 0.0
        self._threads = ThreadPoolExecutor(OPERATIONS_AT_ONCE, thread_name_prefix="agentgym-docker")
        self._starting = asyncio.Semaphore(OPERATIONS_AT_ONCE)
        self._owner = owner()
        self._run = secrets.token_hex(6)
        self._heart = Heart(self._run, lambda: self.client, self._missed)
        self._lookout = Lookout()
        self._guard = Guard(host, self._run)
        self._numbers = itertools.count()
        self._names: set[str] = set()
        self._digest: str | None = None
        self._folder = new_folder("run")

    @functools.cached_property
    def client(self) -> "docker.APIClient":
        """The engine's API client, opened on first use."""
        return connect(host=self.host)

    async def do(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking operation in this client's threads, with its errors translated into SandboxErrors."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(translated, operation, *args, **kwargs))

    async def prepare(self, spec: DockerSettings) -> None:
        """Prepare the engine for sandboxes of this spec.

        This starts the heartbeat, removes leftovers of ended clients, checks the memory, and finds or builds the
        sandboxes' image. With services, it checks that the engine has their images, and starts the guard if the engine
        is on this machine.
        """
        await self.do(self._heart.start)
        await self.do(self.sweep)
        await self.do(lambda: check_memory(spec, self.host, self._traits.memory_mb))
        await self.digest(spec)
        await self.do(check_images, self.client, spec.services)
        if spec.services and self.is_here:
            self._guard.start()

    async def digest(self, spec: DockerSettings) -> str:
        """Return the id of the spec's image, which is built on the engine first if missing."""
        if self._digest is None:
            self._digest = await self.do(ready_image, self.host, spec)
        return self._digest

    async def start(self, spec: DockerSettings) -> RemoteSandbox:
        """Start a sandbox and its services; on failure or cancellation, remove everything that was created."""
        if spec.needs_sockets and not self.is_here:
            raise SandboxError(f"the engine at {self.host}: services and Allow(...) need an engine on this machine")
        async with self._starting:
            digest = await self.digest(spec)
            name = f"agentgym-{self._run}-{next(self._numbers)}"
            self._names.add(name)
            self.sandboxes += 1
            try:
                with named_refusals(spec):
                    start = self._start_connected if self.is_here else self._start_attached
                    return await start(spec, name, digest)
            except BaseException:
                await self.end(name)
                raise

    @property
    def is_here(self) -> bool:
        """Whether the engine is on this machine.

        Only then can its containers share folders and sockets with this process.
        """
        return self.host.startswith("unix://")

    async def _start_connected(self, spec: DockerSettings, name: str, digest: str) -> RemoteSandbox:
        folder = self.new_folder()
        with listener(folder / "sandbox.sock") as listening:
            try:
                # The thread cannot be cancelled, so a cancelled start is waited for and undone.
                await finished(self.do(self.create, spec, name, folder))
                await finished(self.do(self.client.start, name))
                connection = await accepted(listening, functools.partial(self.do, self._state, name))
                return await self._open(connection, spec, name, folder, digest)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    async def _open(
        self, connection: socket.socket, spec: DockerSettings, name: str, folder: Path, digest: str
    ) -> RemoteSandbox:
        """Return the sandbox at the other end of a new connection, with its network and its services."""
        network = await network_of(connection, spec)
        services = Services(self, name, spec.services, network)

        async def end() -> None:
            try:
                await services.remove()
            finally:
                await self.end(name, folder)

        try:
            if services.each:
                network.beside = services
            why_it_ended = functools.partial(self.why_it_ended, spec, name)
            sandbox = await first_word(await Wire.over(connection), digest, end, why_it_ended, network)
            services.cut = sandbox.link.cut
            await sandbox.begin_surroundings()
            return sandbox
        except BaseException:
            connection.close()
            await release(network, services.remove)
            raise

    async def _start_attached(self, spec: DockerSettings, name: str, digest: str) -> RemoteSandbox:
        await finished(self.do(self.create, spec, name, None))
        try:
            wire = await attach(self.host, name)
        except (OSError, TimeoutError, WireError) as error:
            raise EngineDown(f"the Docker engine at {self.host} did not attach to a container: {error}") from error
        try:
            await finished(self.do(self.client.start, name))
        except BaseException:
            wire.close()
            raise
        end, why_it_ended = functools.partial(self.end, name), functools.partial(self.why_it_ended, spec, name)
        return await first_word(wire, digest, end, why_it_ended)

    def new_folder(self) -> Path:
        """Create a folder to mount into one container."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        folder.chmod(0o755)
        return folder

    def create(self, spec: DockerSettings, name: str, folder: Path | None) -> None:
        """Create a container without starting it.

        Args:
            spec: The container's settings.
            name: The container's name.
            folder: The folder with the socket that the server connects to; None to connect over the container's
                standard input and output.
        """
        client = self.client
        client.create_container(
            self._digest,
            command=[json.dumps(server_config(spec, connected=folder is not None))],
            name=name,
            # Under gVisor, input is always open, because gVisor makes the sandbox's user its owner. A closed input
            # would be this machine's /dev/null.
            stdin_open=folder is None or spec.runtime == GVISOR,
            user=sandbox_user(spec, engine_maps_users=self._traits.maps_users),
            hostname="sandbox",
            use_config_proxy=False,  # Otherwise the environment would get the user's proxies with their passwords.
            network_disabled=spec.network == NONE,
            environment=proxy_environment(spec.network, list(spec.services)),
            labels=self.labels(),
            host_config=client.create_host_config(
                binds=[] if folder is None else [f"{folder}:{INSIDE}:ro"],
                mounts=read_only_mounts(spec.volumes),
                **(container_limits(spec) | self._as_podman_has_it(spec)),
            )
            | UNMASKED,
        )

    def _as_podman_has_it(self, spec: DockerSettings) -> dict[str, Any]:
        """Return the options of a container that differ if the engine is podman, or {} for other engines.

        Podman can set only some resource limits. It reads the seccomp profile from a file, which this method writes.
        """
        if not self._traits.is_podman:
            return {}
        path = self._folder / f"seccomp-{spec.network != NONE}.json"
        path.write_text(system_calls(spec))
        return {"security_opt": ["no-new-privileges:true", f"seccomp={path}"], "ulimits": podman_ulimits()}

    @functools.cached_property
    def _traits(self) -> EngineTraits:
        return engine_traits(self.client)

    def labels(self) -> dict[str, str]:
        """Return the labels of this client's containers, by which they are found and removed."""
        return {
            OWNER_LABEL: self._owner,
            RUN_LABEL: self._run,
            "agentgym.created": str(int(time.time())),
        }

    @property
    def heard(self) -> dict[str, Callable[[int], Awaitable[None]]]:
        """Callbacks for when a service ends, keyed by the id of its container; each gets the exit code."""
        return self._guard.heard

    def claim(self, name: str) -> None:
        """Register a container as in use, so that no sweep removes it."""
        self._names.add(name)

    async def why_it_ended(self, spec: DockerSettings, name: str) -> str | None:
        """Return how the code in a sandbox ended the sandbox, or None if the code was not the cause.

        None is also returned if the container is still running or is gone, or if its engine doesn't say.
        """
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
            return f"it used up its container's memory ({spec.container_mb} MB, from memory_mb and disk_mb)"
        # Under gVisor the code can kill its server; under runc a signal to the server comes from outside.
        if code == SANDBOX_KILLED or (spec.runtime == "runsc" and code):
            return f"its container ended with code {code}"
        return None

    async def end(self, name: str, folder: Path | None = None) -> None:
        """Remove the container and its folder.

        A container that is already gone is not an error, and one that can't be removed is left for the next sweep.
        """
        self.sandboxes -= name in self._names
        try:
            await self.remove(name)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    async def remove(self, name: str) -> None:
        """Remove one of our containers; if it can't be removed, it is left for the next sweep."""
        if name not in self._names:
            return
        self._names.discard(name)
        try:
            await finished(self.do(self._remove, name))
        except SandboxError as error:
            # As text: a log handler that stores the error would keep its frames alive, and the sockets in them.
            _log.warning("could not remove a container, which is left for the next sweep: %s", str(error))

    async def close(self) -> None:
        """Remove everything that this client still has on the engine, and stop its threads."""
        try:
            with suppress(SandboxError):
                await self.do(self._remove_run)
        finally:
            try:
                await self._guard.stop()
            finally:
                self._threads.shutdown(wait=False)
                shutil.rmtree(self._folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove leftovers of ended clients, and this client's containers that have ended or aren't in use.

        A container is in use from its registration, by `start` or `claim`, until its removal.
        """
        found = traces(self.client)
        mine = found.pop(self._run, None)
        for container in mine.containers if mine is not None else ():
            known = container["Names"][0].lstrip("/") in self._names if container["Names"] else False
            # A service that ended before its sandbox stays, because its logs are still needed.
            ended = container["State"] in ("exited", "dead") and LABEL not in container["Labels"]
            if ended or not known:
                self._remove(container["Id"])
        for token in self._lookout.ended(found, engine_time(self.client)):
            for container in found[token].containers:
                self._remove(container["Id"])
            for volume in found[token].volumes:
                remove_volume(self.client, volume)
        sweep_folders()

    def _missed(self, error: Exception) -> None:
        _log.warning(
            "missed a heartbeat at %s: %s. After %.0f s without one, clients on other machines may treat this one "
            "as ended and remove its containers",
            *(self.host, str(error), DEAD_S),
        )

    def _remove_run(self) -> None:
        """Remove this client's containers, then its heartbeat.

        Without the heartbeat, this client later counts as ended, and other clients remove any leftovers.
        """
        try:
            if "client" in self.__dict__:
                for container in self.client.containers(all=True, filters={"label": f"{RUN_LABEL}={self._run}"}):
                    self._remove(container["Id"])
        finally:
            try:
                self._heart.stop()
            finally:
                if "client" in self.__dict__:
                    self.client.close()

    def _state(self, container: str) -> dict[str, Any]:
        state: dict[str, Any] = self.client.inspect_container(container)["State"]
        return state

    def _remove(self, container: str) -> None:
        remove_container(self.client, container)
