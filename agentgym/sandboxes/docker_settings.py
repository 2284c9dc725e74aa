"""The settings of boxes in containers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DockerSettings:
    """What each container is made from, and what it may use."""

    image: str | None = None
    """None takes the one that `agentgym sandbox build` makes for this agentgym's server."""
    memory_mb: int = 512
    """Of the whole box, its files in memory included."""
    disk_mb: int = 64
    cpus: float = 1.0
    pids: int = 128
    network: str = "none"
    """Any other name opens the box to that network of the engine."""
    hosts: tuple[str, ...] = ()
    """Engines whose boxes make up one pool, as in DOCKER_HOST; none takes DOCKER_HOST, else the local engine."""
    runtime: str | None = None
    """One of the engine's runtimes. "runsc" adds 256 MB and allows 1024 processes: gVisor's own count too."""
