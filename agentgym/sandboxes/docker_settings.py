"""Settings of boxes in Docker containers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DockerSettings:
    """The image of each container and the resources that it may use."""

    image: str | None = None
    """The image's name; None takes the image that `agentgym sandbox build` makes for this version."""
    memory_mb: int = 512
    """Memory of the whole box in MB, its files in memory included."""
    disk_mb: int = 64
    cpus: float = 1.0
    pids: int = 128
    network: str = "none"
    """The engine's network that the box may use; "none" gives it no network."""
    hosts: tuple[str, ...] = ()
    """The engines of one pool, in the form of DOCKER_HOST; empty takes DOCKER_HOST, else the local engine."""
    runtime: str | None = None
    """The engine's runtime. "runsc" adds 256 MB and allows 1024 processes, for those of gVisor itself count too."""
