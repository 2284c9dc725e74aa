"""Settings of sandboxes in Docker containers, translated for the engine and for the server inside."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

from agentgym.config_fields import Above0, Name, Names, Positive, Word, Words, config
from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.client import FORWARD, address
from agentgym.sandboxes.docker.images.names import INSIDE
from agentgym.sandboxes.network.modes import LOOPBACK, NONE, engine_network, has_own_loopback, server_network
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.network.services import Service, check_services
from agentgym.sandboxes.protocol.arguments import SandboxMemory
from agentgym.sandboxes.seccomp import filters, profile
from agentgym.sandboxes.server_files import BRANCHES, RESERVE, SERVERS, arena, next_user
from agentgym.sandboxes.volumes import check_volumes

GVISOR = "runsc"
GVISOR_MB, GVISOR_PIDS = 256, 1024
GVISOR_LACKS = (
    "under gVisor, a program that a hidden test starts can read and write the processes that judge it, and forge "
    "its verdict; if tests run code that may attack them, use expect=, Docker without gVisor, or bubblewrap"
)
NOBODY = 65534
SPOKEN = ("unix://", "tcp://", "http://", "https://")
FOLDERS = 4
"""Number of in-memory folders of `disk_mb` each: the working folder, its branches, a verifier's copy, and /dev/shm."""
OWN_LOOPBACK = {"net.ipv4.tcp_max_tw_buckets": "0", "net.ipv4.tcp_abort_on_overflow": "1"}
"""Kernel settings that keep an episode's connections out of the next episode.

The server of a bubblewrap sandbox sets these itself.
"""
NOTHING_LEARNT = {"net.ipv4.tcp_no_metrics_save": "1", "net.ipv4.tcp_fastopen": "0"}
"""Kernel settings that keep TCP's measurements of an address in one episode out of the next.

The server of a bubblewrap sandbox sets these itself.
"""


@config(frozen=True, kw_only=True)
class DockerSettings:
    """The image of each container and the resources that it may use."""

    image: Word | None = None
    """Name of any image in the engine; None uses the one that `agentgym sandbox build` creates for this version.

    If the image lacks the sandbox's server, the server is added on top, once. If the image has no suitable Python, a
    separate one is added for the server.
    """
    dockerfile: Name | None = None
    """A folder with a Dockerfile to build the image from, instead of `image`; built once per content of the folder."""
    pip: Words = ()
    """Packages that code in the sandbox can import, installed once, when a pool of such sandboxes is first opened."""
    apt: Words = ()
    """Packages from the image's Debian or Ubuntu, installed in the same way as those of `pip`."""
    volumes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Folders and files on the engine's machine, keyed by their path in the sandbox, where they are read-only."""
    memory_mb: SandboxMemory = 512
    """Memory limit in MB for all programs of a sandbox together. Files don't count toward it: see `disk_mb`."""
    disk_mb: Positive = 64
    """Size of each of the sandbox's folders in MB.

    The folders are in memory, so the container may use `memory_mb` plus four times `disk_mb`: for the working folder,
    for its branches, for the copy that `verify` judges, and for /dev/shm.
    """
    cpus: Above0 = 1.0
    pids: Positive = 128
    """Maximum processes and threads; the container has 64 more, reserved for a verifier."""
    network: Word | Allow = NONE
    """What the sandbox may reach.

    "none" for no internet sockets at all, "loopback" for only itself, `Allow(...)` for the listed hosts through a
    logging proxy, or the name of one of the engine's networks.
    """
    services: Mapping[str, Service] = field(default_factory=dict, hash=False)
    """Service containers next to the sandbox, by name.

    They share the sandbox's loopback, end with the sandbox, and are new in every episode.
    """
    hosts: Names = ()
    """Addresses of the pool's Docker engines, in the format of DOCKER_HOST.

    If empty, DOCKER_HOST is used, or else the local engine.
    """
    runtime: Word | None = None
    """The engine's runtime; None uses the engine's default.

    "runsc" is gVisor, which needs memory and processes for itself. So it adds 256 MB to the container's memory and
    allows at least 1024 processes.
    """

    def __post_init__(self) -> None:
        if self.image is not None and self.dockerfile is not None:
            raise ValueError("image, dockerfile: give only one of them; the Dockerfile's FROM names the base image")
        if self.dockerfile is not None and not (Path(self.dockerfile) / "Dockerfile").is_file():
            raise ValueError(f"dockerfile: {self.dockerfile!r} is not a folder that contains a Dockerfile")
        for number, host in enumerate(self.hosts):
            if not host.startswith(SPOKEN):
                raise ValueError(f"hosts.{number}: {host!r}: only unix:// and tcp:// are supported; {FORWARD}")
        if isinstance(self.network, str) and (self.network == "host" or ":" in self.network):
            raise ValueError(
                f"network: {self.network!r} would share the network of this machine or of another container"
            )
        check_volumes(self.volumes, here=all(host.startswith("unix://") for host in self.hosts or (address(),)))
        check_services(self.services)
        if self.services and self.network == NONE:
            raise ValueError('services: the sandbox reaches them over its loopback; set network="loopback"')
        if self.needs_sockets and self.runtime == GVISOR:
            raise ValueError(
                f"runtime: {GVISOR!r} cannot pass sockets to this machine, so services and Allow(...) are unavailable"
            )

    @property
    def container_mb(self) -> int:
        """Memory limit of a container in MB.

        It is the memory for programs plus the memory for the in-memory folders, so that files take none from the
        programs.
        """
        return self.memory_mb + FOLDERS * self.disk_mb + (GVISOR_MB if self.runtime == GVISOR else 0)

    @property
    def needs_sockets(self) -> bool:
        """Whether the sandbox needs sockets that its server passes to this machine.

        This is so with services, or with `Allow(...)`.
        """
        return bool(self.services) or isinstance(self.network, Allow)


REFUSED = ((r"\bCPUs\b", "cpus"), ("runtime", "runtime"), (r"\bnetwork\b", "network"), ("[Mm]emory", "memory_mb"))
"""Patterns in an engine's refusals, each with the setting that the refusal is about."""


@contextmanager
def named_refusals(spec: DockerSettings) -> Iterator[None]:
    """Add the name of the setting to the error with which an engine refuses the setting's value.

    This applies to SandboxErrors that are raised inside the `with` statement, for example because the engine doesn't
    have the runtime. Errors that match no pattern in `REFUSED` are not changed.
    """
    try:
        yield
    except SandboxError as error:
        said = str(error)
        names = [name for words, name in REFUSED if "the Docker engine: " in said and re.search(words, said)]
        if not names:
            raise
        raise type(error)(f"{names[0]}: {getattr(spec, names[0])!r} was refused: {said}") from error


def check_memory(spec: DockerSettings, host: str, machine_mb: int) -> None:
    """Raise SandboxError if a sandbox may use more memory than its engine's machine has; 0 MB means unknown."""
    if 0 < machine_mb < spec.container_mb:
        raise SandboxError(
            f"memory_mb, disk_mb: a sandbox may use memory_mb plus four times disk_mb, {spec.container_mb} MB, but "
            f"the machine of the engine at {host} has {machine_mb} MB; make one of them smaller"
        )


def server_config(spec: DockerSettings, *, connected: bool) -> dict[str, Any]:
    """Return the configuration of the server in the container: folders, limits of each process, and how it connects.

    Args:
        spec: The container's settings.
        connected: Whether the server connects to a socket in the mounted folder; otherwise it uses its standard input
            and output.
    """
    limits = {"NOFILE": 512, "CORE": 0}
    if spec.runtime == GVISOR:  # Exceeding the container's own limits would end gVisor itself, and with it the sandbox.
        limits |= {"AS": spec.memory_mb << 20, "NPROC": spec.pids}
    else:
        limits |= {"SIGPENDING": 1024, "MSGQUEUE": 256 << 10}
    wipe = ["/tmp", BRANCHES, "/dev/shm", "/dev/mqueue"]
    config: dict[str, Any] = {"work": "/tmp", "branches": BRANCHES, "wipe": wipe, "limits": limits}
    config["reserve"] = RESERVE
    config["nice"] = 19  # Code and server share `cpus`: otherwise, code could leave the server no time to kill it.
    if spec.runtime != GVISOR:  # gVisor allows no namespaces, and its kernel handles all system calls.
        config["filter"] = filters(network=spec.network != NONE)
        config["arena"] = arena(
            spec.disk_mb,
            shared=list(spec.volumes),
            users=True,
            networked=spec.network != NONE,
            leads_out=bool(spec.services) or spec.network not in (NONE, LOOPBACK),
        )
    if connected and spec.network != NONE and spec.runtime != GVISOR:
        config["network"] = server_network(spec.network)
    return config | ({"connect": f"{INSIDE}/sandbox.sock"} if connected else {})


def sandbox_user(spec: DockerSettings, *, engine_maps_users: bool) -> str:
    """Return the user of a new container, different from that of any other container, as "UID:GID".

    The code sees itself as nobody (65534) in any case. The user is nobody itself under gVisor, or if the engine maps
    users and so has only a few.
    """
    user = NOBODY if engine_maps_users or spec.runtime == GVISOR else next_user()
    return f"{user}:{user}"


def container_limits(spec: DockerSettings) -> dict[str, Any]:
    """Return the container's limits, as options of the docker package."""
    from docker.types import LogConfig

    gvisor = spec.runtime == GVISOR
    memory = f"rw,exec,nosuid,nodev,mode=1777,size={spec.disk_mb}m"
    return {
        "runtime": spec.runtime,
        "network_mode": engine_network(spec.network),
        "sysctls": network_settings(spec),
        "extra_hosts": dict.fromkeys(spec.services, "127.0.0.1"),
        "read_only": True,
        "tmpfs": {"/tmp": memory, BRANCHES: memory},
        "shm_size": spec.disk_mb << 20,
        "ipc_mode": "private",
        "mem_limit": spec.container_mb << 20,
        "memswap_limit": spec.container_mb << 20,
        "nano_cpus": int(spec.cpus * 1e9),
        "pids_limit": max(spec.pids, GVISOR_PIDS) if gvisor else spec.pids + SERVERS + RESERVE,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true", f"seccomp={system_calls(spec)}"],
        "log_config": LogConfig(type="none"),
    }


def network_settings(spec: DockerSettings) -> dict[str, str] | None:
    """Return the kernel settings of the container's network, or None if it needs none.

    It needs none without a network, or under gVisor, whose separate network stack retains nothing between episodes.
    """
    if spec.network == NONE or spec.runtime == GVISOR:
        return None
    return NOTHING_LEARNT | (OWN_LOOPBACK if has_own_loopback(spec.network) else {})


def system_calls(spec: DockerSettings) -> str:
    """Return the system calls that the container may make, as the JSON text that an engine accepts.

    Except under gVisor, they include the calls for creating namespaces, which are for the sandbox's keeper: the
    process that starts each episode. Code runs under a stricter filter, which the server installs.
    """
    return profile(network=spec.network != NONE, keeper=spec.runtime != GVISOR)
