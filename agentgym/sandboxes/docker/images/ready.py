"""The image of a spec: found in the engine by its digest, or built there once."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.heartbeat import lent_labels
from agentgym.sandboxes.docker.images.build_log import announce
from agentgym.sandboxes.docker.images.folder import build_folder, folder_digest
from agentgym.sandboxes.docker.images.layer import put_server_on
from agentgym.sandboxes.docker.images.names import BUILD, IMAGE, SERVER_LABEL, default_image, find
from agentgym.sandboxes.docker.images.packages import add_packages
from agentgym.sandboxes.server_files import server_digest

if TYPE_CHECKING:
    import docker

BUILD_S = 1800
_building = threading.Lock()
"""Allows one build at a time per process, so that a second build of the same image finds the image of the first."""


class ImageSpec(Protocol):
    """The ingredients of an image."""

    @property
    def image(self) -> str | None: ...
    @property
    def dockerfile(self) -> str | None: ...
    @property
    def pip(self) -> tuple[str, ...]: ...
    @property
    def apt(self) -> tuple[str, ...]: ...


def ready_image(host: str, spec: ImageSpec) -> str:
    """Return the id of the image that sandboxes of this spec run; anything missing is built on the engine.

    Args:
        host: The engine's address.
        spec: The image's ingredients.

    Raises:
        SandboxError: If the image doesn't exist, with advice in the message, or if a build fails, with the end of its
            output.
    """
    with _building, connect(BUILD_S, host) as client:
        base, name = _base(client, spec)
        with_server = _with_server(client, base, name)
        if not (spec.pip or spec.apt):
            return with_server
        return _with_packages(client, host, spec, with_server, name)


def _with_packages(client: "docker.APIClient", host: str, spec: ImageSpec, image: str, name: str) -> str:
    words = " ".join([*(f"pip:{package}" for package in spec.pip), *(f"apt:{package}" for package in spec.apt)])
    tag = f"{IMAGE}:with-{_key(image, words)}"

    def make(labels: Mapping[str, str]) -> str:
        is_local = host.startswith("unix://")
        return add_packages(client, image, pip=spec.pip, apt=spec.apt, tag=tag, labels=labels, is_local=is_local)

    return _once(client, tag, f"building an image from {name} with {words} (only once)", make)


def _base(client: "docker.APIClient", spec: ImageSpec) -> tuple[str, str]:
    """Return the id of the base image that everything is added to, and its name for messages."""
    if spec.dockerfile is not None:
        folder = Path(spec.dockerfile)
        tag = f"{IMAGE}:folder-{folder_digest(folder)[:12]}"
        found = find(client, tag)
        if found is None:
            announce(f"building the Dockerfile in {spec.dockerfile!r} (only once for this content)")
            return build_folder(client, folder, tag=tag), spec.dockerfile
        return str(found["Id"]), spec.dockerfile
    name = spec.image or default_image()
    found = find(client, name)
    if found is None and spec.image is not None:
        raise SandboxError(
            f"the Docker engine has no image {name!r}; run `docker pull {name}`, "
            f"or build one from a folder: Docker(dockerfile=...) or `{BUILD} --dockerfile FOLDER --tag {name}`"
        )
    if found is None:
        raise SandboxError(f"the Docker engine has no image {name!r}; build it with `{BUILD}`")
    return str(found["Id"]), name


def _with_server(client: "docker.APIClient", base: str, name: str) -> str:
    found = find(client, base)
    assert found is not None
    if (found["Config"].get("Labels") or {}).get(SERVER_LABEL) == server_digest():
        return base
    announced = f"adding the sandbox server to the image {name} (only once)"
    tag = server_tag(base)
    return _once(client, tag, announced, lambda labels: put_server_on(client, base, name, tag, labels))


def server_tag(base: str) -> str:
    """Return the name of the image that consists of a base image, given by its id, and the server."""
    return f"{IMAGE}:on-{_key(base, server_digest())}"


def _once(client: "docker.APIClient", tag: str, announced: str, make: Callable[[Mapping[str, str]], str]) -> str:
    """Return the id of the image with that tag; if the image is missing, log `announced` and create it with `make`."""
    found = find(client, tag)
    if found is not None:
        return str(found["Id"])
    announce(announced)
    with lent_labels(client) as labels:
        return make(labels)


def forget(client: "docker.APIClient", image: str) -> None:
    """Remove an image if it has no name anymore and nothing uses it."""
    from docker.errors import APIError

    found = find(client, image)
    if found is not None and not found["RepoTags"]:
        with suppress(APIError):  # A container or another image may use it.
            client.remove_image(image)


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
