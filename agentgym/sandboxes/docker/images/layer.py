"""The server put on any image, with a Python of its own where the image has none."""

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
"""What follows the interpreter in the command of each image."""
PREPARE = f"""
import compileall, sys
from py_compile import PycInvalidationMode as mode
old = sys.version_info < (3, 9)
sys.exit(old or not compileall.compile_dir({SERVER!r}, quiet=1, invalidation_mode=mode.UNCHECKED_HASH))
"""
"""Bytecode that is never compared with its source: a new sandbox costs two thirds of the processor time then."""
START_S = 120


def put_server_on(client: "docker.APIClient", image: str, name: str, tag: str, labels: Mapping[str, str]) -> str:
    """Return the id of a new image with that tag: the given one, and the server on top.

    The image's own python3 runs it where there is one of 3.9 or newer; else this machine's Python is put beside it.
    Volumes that the image declares are folders of the new one: nothing in a sandbox outlives a reset.
    """
    found = client.inspect_image(image)  # type: ignore[no-untyped-call]
    made = _with_its_python(client, image, found["Config"], tag, labels)
    if made is None:
        check_fits(found["Architecture"], name)
        made = _with_our_python(client, image, found["Config"], tag, labels)
    return made


def python_of(config: Mapping[str, Any]) -> list[str]:
    """Return the command of the interpreter that an image with the server runs, from the image's settings."""
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
                return None  # There is no such program.
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
    """Lend a container for building, which is removed at the end; it has no network unless `options` say so."""
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
    """Return the instructions of a Dockerfile that make an image start the server with this interpreter."""
    return [
        f"ENTRYPOINT {json.dumps([*python, *START])}",
        "CMD []",
        "USER 65534:65534",
        "WORKDIR /tmp",
        *(f"ENV {setting}" for setting in ("HOME=/tmp", "USER=nobody", "LANG=C.UTF-8", "TMPDIR=/tmp")),
        f"LABEL {SERVER_LABEL}={server_digest()}",
        # Else each container that anybody makes of the image would carry the owner of its build.
        *(f'LABEL {label}=""' for label in (OWNER_LABEL, RUN_LABEL)),
    ]


def commit(
    client: "docker.APIClient", container: str, changes: Sequence[str], config: Mapping[str, Any], tag: str
) -> str:
    """Make an image of the container, under that name from the first moment on, and return its id.

    `config` are the settings of the image below. The one that another process has just made is taken in its place.
    """
    if (other := find(client, tag)) is not None:
        return str(other["Id"])
    name, _, version = tag.rpartition(":")
    if config.get("Healthcheck"):
        changes = [*changes, "HEALTHCHECK NONE"]
    if not config.get("Volumes"):
        made = client.commit(container, name, version, changes="\n".join(changes), pause=False)["Id"]
        return str(client.inspect_image(made)["Id"])  # type: ignore[no-untyped-call]  # Podman's first answer is shorter.
    # Settings can be added to a commit, and a declared volume cannot be taken away: the files alone go over.
    pairs = [entry.partition("=") for entry in config.get("Env") or ()]
    below = [f"ENV {json.dumps(name)[1:-1]}={json.dumps(value)}" for name, _, value in pairs]
    files = client.export(container)
    answer = client.import_image_from_stream(files, repository=name, tag=version, changes=[*below, *changes])
    return str(json.loads(answer.strip().splitlines()[-1])["status"])


@contextmanager
def put(client: "docker.APIClient", container: str) -> Iterator[tarfile.TarFile]:
    """Yield an archive of files, which is unpacked at the root of a container when the block ends well."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            yield archive
        file.seek(0)
        client.put_archive(container, "/", file)


def _add_server(archive: tarfile.TarFile) -> None:
    folder = tarfile.TarInfo("tmp")  # An image may have none, and a sandbox's own takes its mode.
    folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
    archive.addfile(folder)
    for name, text in server_files().items():
        add_file(archive, f"{SERVER}/{name}", text)


def _add_bytecode(archive: tarfile.TarFile) -> None:
    """As `PREPARE` makes it, by the same Python on this side."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in server_files().items():
            source, target = Path(folder, name), Path(folder, f"{name}c")
            source.write_bytes(text)
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(source), str(target), f"{SERVER}/{name}", doraise=True, invalidation_mode=mode)
            compiled = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            add_file(archive, f"{SERVER}/__pycache__/{compiled}", target.read_bytes())


def add_file(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    """Add a file that everybody may read, and nobody but root may write."""
    info = tarfile.TarInfo(path.lstrip("/"))
    info.size, info.mode = len(content), 0o644
    archive.addfile(info, io.BytesIO(content))
