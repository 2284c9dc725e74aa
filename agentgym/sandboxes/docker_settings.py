"""Settings of boxes in Docker containers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgym.sandboxes.volumes import check_volumes


@dataclass(frozen=True, kw_only=True)
class DockerSettings:
    """The image of each container and the resources that it may use."""

    image: str | None = None
    """The name of any image in the engine; None takes the one that `agentgym sandbox build` makes for this version.

    An image without the sandbox's server gets it on top, once, and a Python of its own where it has none.
    """
    dockerfile: str | None = None
    """A folder with a Dockerfile to build the image from, once for each content of the folder; in place of `image`."""
    pip: tuple[str, ...] = ()
    """Packages that code in the box can import; they are installed once, when a pool of such boxes is first opened."""
    apt: tuple[str, ...] = ()
    """Packages of the image's Debian or Ubuntu; they are installed in the same way."""
    volumes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Folders and files of the engine's machine by their path in the box; code in the box can only read them."""
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

    def __post_init__(self) -> None:
        if self.image is not None and self.dockerfile is not None:
            raise ValueError("image, dockerfile: give one of them; the Dockerfile's FROM names the image below")
        for name in ("pip", "apt", "hosts"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: a tuple of texts, such as ({getattr(self, name)!r},)")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_volumes(self.volumes)
