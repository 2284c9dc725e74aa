"""The build of a sandbox image, for `agentgym sandbox build`."""

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.errors import SandboxError
from agentgym.machine.process_identity import lent_folder
from agentgym.sandboxes.docker.client import address, connect, engine_errors
from agentgym.sandboxes.docker.images.build_log import announce
from agentgym.sandboxes.docker.images.folder import build_folder
from agentgym.sandboxes.docker.images.names import IMAGE, default_image, find
from agentgym.sandboxes.docker.images.ready import forget, ready_image
from agentgym.sandboxes.server_files import image_folder, server_digest

if TYPE_CHECKING:
    from docker import APIClient

DEBOOTSTRAP = ("debootstrap", "--variant=minbase", "--include=python3,ca-certificates")
SUITE = "bookworm"
BUILD_S = 600
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings of an image to build: a base image or a Dockerfile's folder, and the pip and apt packages to install."""

    image: str | None
    dockerfile: str | None
    pip: tuple[str, ...]
    apt: tuple[str, ...]


def build(
    tag: str | None = None,
    *,
    base: str | None = None,
    dockerfile: str | None = None,
    from_debootstrap: bool = False,
    pip: Sequence[str] = (),
    apt: Sequence[str] = (),
) -> str:
    """Build a sandbox image and return its id.

    Without `base` and `dockerfile`, the image is built from agentgym's own Dockerfile if its registry is reachable.
    Otherwise, or with `from_debootstrap`, it is built on a minimal Debian from debootstrap, which needs root and a
    package mirror.

    Args:
        tag: The image's name; None for this version's default name.
        base: Any image to build on.
        dockerfile: A folder with a Dockerfile to build on, instead of `base`.
        from_debootstrap: Whether to build on debootstrap's Debian without trying the registry.
        pip: Packages to install with pip.
        apt: Packages to install with apt-get.

    Raises:
        SandboxError: If an argument is invalid or the build fails; the message says why.
    """
    if base is not None and dockerfile is not None:
        raise SandboxError("base, dockerfile: give only one of them; the Dockerfile's FROM names the base image")
    for field, names in (("tag", (tag,)), ("base", (base,)), ("pip", pip), ("apt", apt)):
        for name in names:
            if name is not None and name.lstrip().startswith("-"):
                raise SandboxError(f"{field}: {name!r} begins with '-' and would be read as an option")
    tag = tag or default_image()
    with engine_errors(), connect(timeout_s=BUILD_S) as client:
        if base is None and dockerfile is None:
            base = _build(client, from_debootstrap=from_debootstrap)
        wanted = Wanted(base, dockerfile, tuple(pip), tuple(apt))
        image = ready_image(address(), wanted)
        last = find(client, tag)
        client.tag(image, *_split(tag))
        if last is not None and last["Id"] != image:
            forget(client, last["Id"])
        return image


def _split(tag: str) -> tuple[str, str]:
    """Return a name's repository and version; a colon before a slash belongs to a registry's port."""
    name, colon, version = tag.rpartition(":")
    return (name, version) if colon and "/" not in version else (tag, "latest")


def _build(client: "APIClient", *, from_debootstrap: bool) -> str:
    """Build the plain image, without packages, and return its name."""
    tag = f"{IMAGE}:plain-{server_digest()}"
    if not from_debootstrap:
        try:
            _build_on(client, tag, {})
            return tag
        except SandboxError as error:
            announce(f"the base image is not available ({error}); building one with debootstrap")
    _build_on(client, tag, {"BASE_IMAGE": _debian(client)})
    return tag


def _build_on(client: "APIClient", tag: str, arguments: dict[str, str]) -> None:
    last = find(client, tag)
    image = build_folder(client, image_folder(), tag=tag, arguments=arguments, labeled=True)
    if last is not None and last["Id"] != image:
        forget(client, last["Id"])


def _debian(client: "APIClient") -> str:
    """Return the name of an image with a minimal Debian from debootstrap, which is created if missing.

    The image is reused by every version of the server.
    """
    made_of = "\0".join([*DEBOOTSTRAP, SUITE, *LEFT_OUT])
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    base = f"{IMAGE}-base:{digest}"
    if find(client, base) is not None:
        announce(f"building on {base}, made earlier by debootstrap; remove that image to get Debian's current packages")
        return base
    with lent_folder("image") as folder:
        root, archive = Path(folder, "root"), Path(folder, "root.tar")
        _run(*DEBOOTSTRAP, SUITE, str(root))
        excluded = [f"--exclude=./{path}/*" for path in LEFT_OUT]
        _run("tar", "--directory", str(root), *excluded, "--create", "--file", str(archive), ".")
        client.import_image_from_file(str(archive), repository=f"{IMAGE}-base", tag=digest)
    return base


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SandboxError(f"{command[0]} is not installed; install it, or build from another base image") from error
    if done.returncode:
        raise SandboxError(f"{command[0]} failed: {(done.stderr or done.stdout)[-500:]}")
