"""The build of the sandbox image, behind `agentgym sandbox build`."""

import io
import logging
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker_client import connect, engine_errors
from agentgym.sandboxes.docker_image import IMAGE, SERVER_LABEL, default_image
from agentgym.sandboxes.server_files import image_folder, server_digest

if TYPE_CHECKING:
    from docker import APIClient, DockerClient

SUITE = "bookworm"
BUILD_S = 600
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
_log = logging.getLogger("agentgym.sandboxes")


def build(
    tag: str | None = None, *, base: str | None = None, from_debootstrap: bool = False, pip: Sequence[str] = ()
) -> str:
    """Build the image and return its id; SandboxError that says why it could not be built.

    It stands on `base`, any image with a python3; without one on the Dockerfile's where its registry can be
    reached; else, or when told so, on a minimal Debian by debootstrap, which needs root and a package mirror.
    Code in the box can import the `pip` packages, which are fetched while the image is built.
    """
    tag = tag or default_image()
    with engine_errors():
        client = _images_of(connect(timeout_s=BUILD_S))
        try:
            plain = f"{tag}-plain" if pip else tag
            if base is not None:
                built = _build_on(client, plain, {"BASE_IMAGE": base})
            else:
                built = _build(client, plain, from_debootstrap=from_debootstrap)
            return _with_packages(client, tag, built, pip) if pip else built
        finally:
            client.close()


def _images_of(api: "APIClient") -> "DockerClient":
    """The docker package's image client, which reports why a build failed."""
    from docker import DockerClient

    class Over(DockerClient):
        def __init__(self) -> None:
            self.api = api

    return Over()


def packages_dockerfile(image: str, pip: Sequence[str]) -> str:
    """Install packages in the image for all users; pip itself comes from Debian where the image has none."""
    return "\n".join(
        [
            f"FROM {image}",
            "USER 0:0",
            "RUN python3 -m pip --version >/dev/null 2>&1 "
            "|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-pip; }",
            f"RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir {shlex.join(pip)}",
            "USER 65534:65534",
            "",
        ]
    )


def _with_packages(client: "DockerClient", tag: str, image: str, pip: Sequence[str]) -> str:
    file = io.BytesIO(packages_dockerfile(image, pip).encode())
    labels = {SERVER_LABEL: server_digest()}
    built, _ = client.images.build(fileobj=file, tag=tag, labels=labels, rm=True, forcerm=True)
    return str(built.id)


def _build(client: "DockerClient", tag: str, *, from_debootstrap: bool) -> str:
    from docker.errors import APIError, BuildError

    if not from_debootstrap:
        try:
            return _build_on(client, tag, {})
        except (APIError, BuildError) as error:
            _log.warning("the base image cannot be had (%s); building one with debootstrap", error)
    base = f"{IMAGE}-base"
    _import_debian(client, base)
    return _build_on(client, tag, {"BASE_IMAGE": base})


def _build_on(client: "DockerClient", tag: str, arguments: dict[str, str]) -> str:
    labels = {SERVER_LABEL: server_digest()}
    image, _ = client.images.build(path=str(image_folder()), tag=tag, buildargs=arguments, labels=labels, rm=True)
    return str(image.id)


def _import_debian(client: "DockerClient", tag: str) -> None:
    with tempfile.TemporaryDirectory(prefix="agentgym-image-") as folder:
        root, archive = Path(folder, "root"), Path(folder, "root.tar")
        _run("debootstrap", "--variant=minbase", "--include=python3,ca-certificates", SUITE, str(root))
        excluded = [f"--exclude=./{path}/*" for path in LEFT_OUT]
        _run("tar", "--directory", str(root), *excluded, "--create", "--file", str(archive), ".")
        client.api.import_image_from_file(str(archive), repository=tag)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SandboxError(f"{command[0]} is not installed; install it, or build from another base") from error
    if done.returncode:
        raise SandboxError(f"{command[0]} failed: {(done.stderr or done.stdout)[-500:]}")
