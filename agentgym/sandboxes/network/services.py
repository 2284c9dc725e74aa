"""Containers that share a sandbox's loopback: created with it, new in every episode, and removed with it."""

import asyncio
import logging
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field

from agentgym.config_fields import Above0, Name, Positive, Text, Word, config
from agentgym.errors import SandboxError
from agentgym.machine.finished import finished
from agentgym.sandboxes.network.sandbox_network import SandboxNetwork
from agentgym.sandboxes.seccomp import profile
from agentgym.types.transcript import one_line

if TYPE_CHECKING:
    import docker

LABEL = "agentgym.service"
MAX_LOGS = 64 << 10
LOG_ON_DISK = "1m"
SAID_LINES = 20
STEP_S = 0.5
KILLED = 128 + signal.SIGKILL
"""The exit code of a container whose first process was ended by SIGKILL."""
_log = logging.getLogger("agentgym.sandboxes")
Port: TypeAlias = Annotated[int, Field(ge=1, le=65535)]
TAKEN = ("localhost", "sandbox")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}", re.ASCII)


@config(frozen=True, kw_only=True)
class Service:
    """A container next to a sandbox, with an application or database that the sandbox's code reaches by its name.

    The names of all services resolve to one loopback, which they share with the sandbox. So two services can't listen
    on the same port, and a service can reach no other network.

    A service's root folder is read-only. It can write to the folders in `writable`, which are in memory. Root in the
    container can also write to its /dev, which has 64 MB and is new in each episode.
    """

    image: Word
    """The image that the container runs."""
    command: Sequence[Text] = ()
    """The arguments after the image's entrypoint; if empty, the image's own arguments are used."""
    entrypoint: Sequence[Text] | None = None
    """The program to run in place of the image's entrypoint; None uses the image's own."""
    env: Mapping[Name, Text] = field(default_factory=dict)
    """Environment variables, in addition to the image's."""
    ready: Port | Name | None = None
    """A port that the ready service listens on, or a URL that it answers with a status below 400.

    None means that the service counts as ready once it has started.
    """
    ready_s: Above0 = 30.0
    """Seconds within which the service must become ready."""
    user: Word | None = None
    """The user in the container; None uses the image's. No user, not even root, has any capability."""
    writable: Sequence[Name] = ("/tmp", "/run")
    """Absolute paths of in-memory folders to which the service can write."""
    memory_mb: Positive = 512
    """Memory limit of the container in MB, including its files in memory."""
    disk_mb: Positive = 128
    """Size in MB of each folder in `writable`, and of /dev/shm."""
    cpus: Above0 = 1.0
    """Number of CPUs that the container may use."""
    pids: Positive = 256
    """Maximum number of processes in the container."""

    def __post_init__(self) -> None:
        if isinstance(self.ready, str) and not _is_url(self.ready):
            raise ValueError(f"ready: {self.ready!r} is neither a port nor a URL such as 'http://db:8000/health'")
        for name in self.env:
            if "=" in name or "\0" in name:
                raise ValueError(f"env: {name!r} is not a variable name")
        for path in self.writable:
            if not path.startswith("/") or ":" in path or path.strip("/") in ("", ".", "..") or "/.." in path:
                raise ValueError(f"writable: {path!r} is not an absolute path of a folder, such as '/tmp'")

    @property
    def ready_port(self) -> int | None:
        """The port that the ready service listens on, or None if it counts as ready once it has started."""
        return (urlsplit(self.ready).port or 80) if isinstance(self.ready, str) else self.ready


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return (
            url.scheme == "http" and bool(url.hostname) and url.port != 0 and re.fullmatch(r"[!-~]+", text) is not None
        )
    except ValueError:  # An invalid port.
        return False


def check_services(services: Mapping[str, Service]) -> None:
    """Check the names of services and the hosts in their `ready` URLs.

    Raises:
        ValueError: If a name can't be a host name, or if the host of a `ready` URL is not a service.
    """
    for name, service in services.items():
        if name in TAKEN:
            raise ValueError(f"services: {name!r} is the name of the sandbox itself; give the service another name")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"services: {name!r} is not a valid name; use lowercase letters, digits and '-', starting with a letter"
            )
        host = urlsplit(service.ready).hostname if isinstance(service.ready, str) else None
        if host is not None and host not in (*services, "localhost", "127.0.0.1"):
            known = ", ".join(map(repr, services))
            raise ValueError(f"services[{name!r}].ready: {host!r} is not a service; the services are {known}")


def check_images(client: "docker.APIClient", services: Mapping[str, Service]) -> None:
    """Raise SandboxError if the engine lacks a service's image."""
    from docker.errors import ImageNotFound

    for name, service in services.items():
        try:
            client.inspect_image(service.image)  # type: ignore[no-untyped-call]
        except ImageNotFound as error:
            raise SandboxError(
                f"services: the Docker engine has no image {service.image!r} for {name!r}; "
                f"run `docker pull {service.image}`"
            ) from error


class ServiceEngine(Protocol):
    """The functions that services need from the engine that runs their sandbox."""

    @property
    def client(self) -> "docker.APIClient": ...

    def labels(self) -> dict[str, str]:
        """Return the labels of the client's containers, by which they are found and removed."""
        ...

    def claim(self, name: str) -> None:
        """Register a container as in use, so that no sweep removes it."""
        ...

    @property
    def heard(self) -> dict[str, Callable[[int], Awaitable[None]]]:
        """Callbacks for when a container ends, keyed by its id; each gets the exit code."""
        ...

    async def do(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Run a blocking operation in the engine's threads."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a container; it is not an error if it is gone already."""
        ...


class Services:
    """The services of one sandbox."""

    def __init__(
        self, engine: ServiceEngine, sandbox: str, settings: Mapping[str, Service], network: SandboxNetwork
    ) -> None:
        self._network = network
        self.each = {
            name: RunningService(engine, sandbox, name, service, self._lose) for name, service in settings.items()
        }
        self.cut: Callable[..., None] | None = None
        """`Link.cut`, called when a service has ended, because the rest of the episode could only fail."""
        self.lost = 0
        """Number of services that have ended in the middle of an episode so far."""

    async def start(self) -> None:
        """Start each service from its image and wait until it is ready.

        Raises:
            SandboxError: If a service does not become ready; the message contains its last output.
        """
        await _all(each.start() for each in self.each.values())
        await _all(each.wait_until_ready(self._network) for each in self.each.values())

    async def remove(self) -> None:
        """Remove all containers; services that had already ended are counted and logged."""
        await _all(each.remove() for each in self.each.values())

    def _lose(self, end: "ServiceEnd") -> None:
        """Count and log a service that ended; if the episode is still running, end its sandbox, too."""
        self.lost += 1
        if end.in_the_episode and self.cut is not None:
            self.cut(end.how, by_its_code=end.by_code)
        _log.warning(
            "%s (%d such ends in this sandbox so far); its last output: %s", end.how, self.lost, end.last_words
        )


async def _all(works: Any) -> None:
    """Await all of the awaitables `works` until each has finished, then raise the first error."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """How a service ended that was expected to keep running."""

    how: str
    last_words: str
    by_code: bool
    """Whether the sandbox's code caused the end, by data that it sent to the service.

    This is assumed if the service ended by itself or ran out of memory. Any other SIGKILL came from outside, because
    nothing inside a container can send one to its first process.
    """
    in_the_episode: bool
    """Whether the episode was still running when the end was noticed; otherwise the episode's end revealed it."""


class RunningService:
    """One running service. Implements `sandboxes.SandboxService`."""

    def __init__(
        self, engine: ServiceEngine, sandbox: str, name: str, service: Service, lose: Callable[["ServiceEnd"], None]
    ) -> None:
        self._engine, self._sandbox, self._name, self._service, self._lose = engine, sandbox, name, service, lose
        self._container = f"{sandbox}-{name}"
        self._id = ""
        self._in_use = False
        """Whether the service was ready and has not ended since."""

    async def start(self) -> None:
        """Create and start the container."""
        self._engine.claim(self._container)
        self._id = await finished(asyncio.ensure_future(self._engine.do(self._create)))
        self._engine.heard[self._id] = self._ended
        await finished(asyncio.ensure_future(self._engine.do(lambda: self._engine.client.start(self._container))))

    async def remove(self) -> None:
        """Remove the container, and report it if it had already ended."""
        self._engine.heard.pop(self._id, None)
        if self._in_use:
            with suppress(SandboxError):  # The engine is gone, and all its containers may be, too.
                state = await self._state()
                if not state["Running"]:
                    await self._ended(state["ExitCode"], in_the_episode=False)
        self._in_use = False
        await self._engine.remove(self._container)

    async def _ended(self, code: int, *, in_the_episode: bool = True) -> None:
        """Report the end of the service, unless it has no `ready` and ended with exit code 0."""
        if not self._in_use or not (code or self._service.ready is not None):
            return
        self._in_use = False
        how = f"the service {self._name!r} ended in the middle of an episode with exit code {code}"
        try:
            by_code = code != KILLED or bool((await self._state())["OOMKilled"])
            last_words = await self._last_words()
        except SandboxError as error:  # The engine does not say.
            by_code, last_words = False, str(error)
        self._lose(ServiceEnd(how, last_words, by_code, in_the_episode))

    async def logs(self, *, lines: int = 200) -> str:
        """Return the last lines of output since the episode started, at most 64 KiB."""
        if lines < 1:
            raise ValueError(f"lines: must be at least 1, got {lines}")
        said: bytes = await self._engine.do(
            lambda: self._engine.client.logs(self._container, stdout=True, stderr=True, tail=lines)
        )
        return said[-MAX_LOGS:].decode("utf-8", "replace")

    async def wait_until_ready(self, network: SandboxNetwork) -> None:
        """Return when the service is ready.

        Raises:
            SandboxError: If the service ends first or takes too long; the message contains its last output.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._service.ready_s
        while not await self._is_ready(network):
            state = await self._state()
            if not state["Running"]:
                raise SandboxError(await self._failed(f"ended with exit code {state['ExitCode']} {state['Error']}"))
            if loop.time() >= deadline:
                ready, seconds = self._service.ready, self._service.ready_s
                raise SandboxError(await self._failed(f"was not ready within {seconds:g} s (ready={ready!r})"))
        self._in_use = True

    async def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self._engine.do(
            lambda: self._engine.client.inspect_container(self._container)["State"]
        )
        return state

    async def _is_ready(self, network: SandboxNetwork) -> bool:
        ready, port = self._service.ready, self._service.ready_port
        if port is None:
            return True
        with suppress(TimeoutError):
            await network.wait_for(port, STEP_S, urlsplit(ready) if isinstance(ready, str) else None)
            return True
        return False

    async def _failed(self, how: str) -> str:
        return f"the service {self._name!r} {how.strip()}; its last output: {await self._last_words()}"

    async def _last_words(self) -> str:
        """Return the end of the service's output as one line for a log.

        The output may contain data from the sandbox's code.
        """
        return one_line((await self.logs(lines=SAID_LINES)).strip()) or "none"

    def _create(self) -> str:
        client, service = self._engine.client, self._service
        made: dict[str, str] = client.create_container(
            service.image,
            command=list(service.command) or None,
            entrypoint=None if service.entrypoint is None else list(service.entrypoint),
            name=self._container,
            user=service.user,
            environment=dict(service.env),
            labels={**self._engine.labels(), LABEL: self._name},
            host_config=client.create_host_config(**_limits(service, self._sandbox)),
        )
        return made["Id"]


def _limits(service: Service, sandbox: str) -> dict[str, Any]:
    from docker.types import LogConfig, Ulimit

    memory = f"rw,exec,nosuid,nodev,mode=1777,size={service.disk_mb}m"
    return {
        "network_mode": f"container:{sandbox}",
        "read_only": True,
        "tmpfs": dict.fromkeys(service.writable, memory),
        "shm_size": service.disk_mb << 20,
        "ipc_mode": "private",
        "mem_limit": service.memory_mb << 20,
        "memswap_limit": service.memory_mb << 20,
        "nano_cpus": int(service.cpus * 1e9),
        "pids_limit": service.pids,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true", f"seccomp={profile(network=True)}"],
        "ulimits": [Ulimit(name="nofile", soft=4096, hard=4096), Ulimit(name="core", soft=0, hard=0)],
        "log_config": LogConfig(type="json-file", config={"max-size": LOG_ON_DISK, "max-file": "1"}),
    }
