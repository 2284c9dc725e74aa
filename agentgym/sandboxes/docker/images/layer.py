"""Adds the server to any image, with a separate Python if the image has none."""

import io
import json
import py_compile
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.sandboxes.docker.client import engine_traits, podman_ulimits
from agentgym.sandboxes.docker.heartbeat import OWNER_LABEL, RUN_LABEL, remove_container
from agentgym.sandboxes.docker.images.names import SERVER_LABEL, find
from agentgym.sandboxes.docker.images.own_python import add_python, check_fits, own_python
from agentgym.sandboxes.server_files import SERVER, server_digest, server_files

if TYPE_CHECKING:
    import docker

START = ("-I", "-S", "-B", SERVER)
"""Arguments of the interpreter that starts the server, at the end of each image's entrypoint."""
PREPARE = f"""
import compileall, sys
from py_compile import PycInvalidationMode as mode
old = sys.version_info < (3, 9)
sys.exit(old or not compileall.compile_dir({SERVER!r}, quiet=1, invalidation_mode=mode.UNCHECKED_HASH))
"""
"""A program that compiles the server's bytecode, or fails if its Python is older than 3.9.

The bytecode is never compared with its source, which cuts a new sandbox's CPU time to two thirds.
"""
START_S = 120


def put_server_on(client: "docker.APIClient", image: str, name: str, tag: str, labels: Mapping[str, str]) -> str:
    """Add the server to an image and return the id of the new image.

    The image's own python3 runs the server if it is 3.9 or newer; otherwise this machine's Python is added. Volumes
    that the image declares become plain folders of the new image, so that nothing in a sandbox outlives a reset.

    Args:
        client: The engine's client.
        image: Id of the image to build on.
        name: Name of the image to build on, for messages.
        tag: The new image's name.
        labels: Labels of the containers that are used for building.

    Raises:
        SandboxError: If the image has no suitable python3 and this machine's Python can't run in it.
    """
    found = client.inspect_image(image)  # type: ignore[no-untyped-call]
    made = _with_its_python(client, image, found["Config"], tag, labels)
    if made is None:
        check_fits(found["Architecture"], name)
        made = _with_our_python(client, image, found["Config"], tag, labels)
    return made


def python_of(config: Mapping[str, Any]) -> list[str]:
    """Return the command of the interpreter that runs the server in an image, from the image's settings."""
    return list(config["Entrypoint"][: -len(START)])


def _with_its_python(
    client: "docker.APIClient", image: str, config: Mapping[str, Any], tag: str, labels: Mapping[str, str]
) -> str | None:
    from docker.errors import APIError

    with lent_container(client, image, ["python3", "-I", "-S", "-c", PREPARE], labels) as container:
        with put(client, container) as archive:
            _add_server(archive)
        try:
            client.start(container)
        except APIError as error:
            if re.search("not found|no such file", str(error), re.IGNORECASE):
                return None  # The image has no such program.
            raise
        if client.wait(container, timeout=START_S)["StatusCode"] != 0:
            return None
        return commit(client, container, settings(["python3"]), config, tag)


def _with_our_python(
    client: "docker.APIClient", image: str, config: Mapping[str, Any], tag: str, labels: Mapping[str, str]
) -> str:
    with lent_container(client, image, own_python(), labels) as container:
        with put(client, container) as archive:
            add_python(archive)
            _add_server(archive)
            _add_bytecode(archive)
        return commit(client, container, settings(own_python()), config, tag)


@contextmanager
def lent_container(
    client: "docker.APIClient",
    image: str,
    command: Sequence[str],
    labels: Mapping[str, str],
    *,
    binds: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """Yield the id of a container for building, which is removed when the `with` block ends.

    The container has no network unless `options` enable it.
    """
    options = {"network_disabled": True, **options}
    ulimits = podman_ulimits() if engine_traits(client).is_podman else None
    made = client.create_container(
        image,
        entrypoint=list(command),
        command=[],
        user="0:0",
        working_dir="/",
        labels=dict(labels),
        use_config_proxy=False,
        host_config=client.create_host_config(binds=list(binds), ulimits=ulimits),
        **options,
    )
    try:
        yield str(made["Id"])
    finally:
        remove_container(client, made["Id"])


def settings(python: Sequence[str]) -> list[str]:
    """Return the Dockerfile instructions that make an image start the server with this interpreter."""
    return [
        f"ENTRYPOINT {json.dumps([*python, *START])}",
        "CMD []",
        "USER 65534:65534",
        "WORKDIR /tmp",
        *(f"ENV {setting}" for setting in ("HOME=/tmp", "USER=nobody", "LANG=C.UTF-8", "TMPDIR=/tmp")),
        f"LABEL {SERVER_LABEL}={server_digest()}",
        # Otherwise, every container created from the image would inherit the labels of the build's owner.
        *(f'LABEL {label}=""' for label in (OWNER_LABEL, RUN_LABEL)),
    ]


def commit(
    client: "docker.APIClient", container: str, changes: Sequence[str], config: Mapping[str, Any], tag: str
) -> str:
    """Create a named image from the container and return its id.

    The image has its name from the start. If another process has just created an image of that name, that image is
    used instead.

    Args:
        client: The engine's client.
        container: Id of the container.
        changes: Dockerfile instructions for the image's settings.
        config: Settings of the base image.
        tag: The image's name.
    """
    if (other := find(client, tag)) is not None:
        return str(other["Id"])
    name, _, version = tag.rpartition(":")
    if config.get("Healthcheck"):
        changes = [*changes, "HEALTHCHECK NONE"]
    if not config.get("Volumes"):
        made = client.commit(container, name, version, changes="\n".join(changes), pause=False)["Id"]
        return str(client.inspect_image(made)["Id"])  # type: ignore[no-untyped-call]  # Podman's first answer is shorter.
    # A commit can add settings but not remove a declared volume, so only the files are carried over.
    pairs = [entry.partition("=") for entry in config.get("Env") or ()]
    below = [f"ENV {json.dumps(name)[1:-1]}={json.dumps(value)}" for name, _, value in pairs]
    files = client.export(container)
    answer = client.import_image_from_stream(files, repository=name, tag=version, changes=[*below, *changes])
    return str(json.loads(answer.strip().splitlines()[-1])["status"])


@contextmanager
def put(client: "docker.APIClient", container: str) -> Iterator[tarfile.TarFile]:
    """Yield a tar archive to add files to, which is unpacked at the container's root if the `with` block succeeds."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            yield archive
        file.seek(0)
        client.put_archive(container, "/", file)


def _add_server(archive: tarfile.TarFile) -> None:
    folder = tarfile.TarInfo("tmp")  # An image may lack /tmp, whose mode a sandbox's tmpfs inherits.
    folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
    archive.addfile(folder)
    for name, text in server_files().items():
        add_file(archive, f"{SERVER}/{name}", text)


def _add_bytecode(archive: tarfile.TarFile) -> None:
    """Add the bytecode that `PREPARE` would compile, but compiled on this machine by the same Python."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in server_files().items():
            source, target = Path(folder, name), Path(folder, f"{name}c")
            source.write_bytes(text)
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(source), str(target), f"{SERVER}/{name}", doraise=True, invalidation_mode=mode)
            compiled = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            add_file(archive, f"{SERVER}/__pycache__/{compiled}", target.read_bytes())


def add_file(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    """Add a file that anyone may read and only root may write."""
    info = tarfile.TarInfo(path.lstrip("/"))
    info.size, info.mode = len(content), 0o644
    archive.addfile(info, io.BytesIO(content))
