"""Installs pip and apt packages on an image that has the server, inside a container with a network."""

import tarfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.images.build_log import BuildLog
from agentgym.sandboxes.docker.images.layer import add_file, commit, lent_container, put, python_of, settings

if TYPE_CHECKING:
    import docker

import ast
import os
import subprocess
import sys
from urllib.parse import unquote, urlsplit

OURS = "/run/agentgym-build"
"""Folder for files that only the build needs; it is removed before the image is created."""
APTS = ("/var/lib/apt/lists/*", "/var/cache/apt/*.bin", "/var/cache/apt/archives/*.deb")
"""Files that apt-get downloads: package lists, and packages before installation."""
FORGET = f"""
import glob, os, shutil
for pattern in {(OURS, *APTS)!r}:
    for path in glob.glob(pattern):
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
"""
CARRIED = frozenset(
    {"index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "proxy", "timeout", "retries"}
    | {"default-timeout", "pre", "prefer-binary", "only-binary", "no-binary"}
)
"""The pip settings for package sources, which are used in the build.

Settings that name a target folder or a Python are not used, because they are for this machine.
"""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
PLACES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")


def add_packages(
    client: "docker.APIClient",
    image: str,
    *,
    pip: Sequence[str],
    apt: Sequence[str],
    tag: str,
    labels: Mapping[str, str],
    is_local: bool,
) -> str:
    """Install packages on an image and return the id of the new image.

    The user's package index, proxies and certificates are used, but are not stored in the image.

    Args:
        client: The engine's client.
        image: The image to build on, which has the server.
        pip: Packages to install with pip.
        apt: Packages to install with apt-get.
        tag: The new image's name.
        labels: Labels of the container that is used for building.
        is_local: Whether the engine is on this machine, so that local package indexes can be mounted.

    Raises:
        SandboxError: If pip or apt-get fails; the message contains the end of its output.
    """
    config = client.inspect_image(image)["Config"]  # type: ignore[no-untyped-call]
    python = python_of(config)
    binds = [f"{path}:{path}:ro" for path in indexes()] if is_local else []
    waiting = [*python, "-c", "import sys; sys.stdin.read()"]
    open_to = {"network_disabled": False, "stdin_open": True}
    with lent_container(client, image, waiting, labels, binds=binds, **open_to) as container:
        environment = _bring(client, container) | proxy_settings()
        client.start(container)
        if apt:
            quiet = environment | {"DEBIAN_FRONTEND": "noninteractive"}
            _run(client, container, ["apt-get", "update", "-qq"], quiet)
            _run(client, container, ["apt-get", "install", "-y", "--no-install-recommends", "--", *apt], quiet)
        if pip:
            _run(client, container, [*python, "-m", "pip", "install", "--no-cache-dir", "--", *pip], environment)
        _run(client, container, [*python, "-c", FORGET], {})
        return commit(client, container, settings(python), config, tag)


def _bring(client: "docker.APIClient", container: str) -> dict[str, str]:
    """Copy pip itself and the user's certificates into the container, and return pip's settings as variables."""
    environment = pip_settings() | {
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PYTHONPATH": f"{OURS}/pip",
    }
    with put(client, container) as archive:
        add_file(archive, f"{OURS}/used", b"")
        if (own := _own_pip()) is not None:
            archive.add(own, f"{OURS}/pip/pip".lstrip("/"), filter=_root)
        certificates = environment.get("PIP_CERT")
        if certificates:
            add_file(archive, f"{OURS}/certificates", Path(certificates).read_bytes())
            environment["PIP_CERT"] = f"{OURS}/certificates"
    return environment


def _own_pip() -> str | None:
    """Return the folder of this Python's pip, or None if it has none.

    Only the folders of `sys.path` are searched. The usual search also asks import hooks. That of setuptools mistakes
    the search for a run of pip, after which setuptools can't be imported anymore.
    """
    found = PathFinder.find_spec("pip")
    folders = None if found is None else found.submodule_search_locations
    return folders[0] if folders else None


def _output(client: "docker.APIClient", command: str) -> Iterator[bytes]:
    """Yield a command's output as it comes, and close the connection, which the library's stream would leave open."""
    from docker.utils.socket import frames_iter

    connection: Any = client.exec_start(command, socket=True)
    try:
        for _, piece in frames_iter(connection, tty=False):  # type: ignore[no-untyped-call]
            yield piece
    finally:
        connection._response.close()
        connection.close()


def _root(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    return None if info.name.endswith("__pycache__") else info


def _run(client: "docker.APIClient", container: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    said = BuildLog()
    made = client.exec_create(container, list(command), environment=dict(environment), user="0:0", workdir="/")
    said.read(_output(client, made["Id"]))
    code = client.exec_inspect(made["Id"])["ExitCode"]
    if code:
        name = next((word for word in ("pip", "apt-get") if word in command), command[0])
        raise SandboxError(f"{name} failed with exit code {code}:\n{said}")


def proxy_settings() -> dict[str, str]:
    """Return the proxies in this process's environment, under their upper- and lowercase names."""
    return {name: os.environ[name] for each in PROXIES for name in (each, each.lower()) if name in os.environ}


def pip_settings() -> dict[str, str]:
    """Return the user's pip settings for package sources, from the environment and pip.conf, as PIP_ variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    # Lowest first: a setting for `install` overrides a global one, and the environment overrides both.
    rank = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listed:
        section, _, setting = line.partition(".")
        name, _, value = setting.partition("=")
        if section in rank and name in CARRIED and rank[section] >= found.get(name, (-1, ""))[0]:
            found[name] = (rank[section], str(ast.literal_eval(value)))
    return {f"PIP_{name.upper().replace('-', '_')}": " ".join(value.split()) for name, (_, value) in found.items()}


def indexes() -> list[str]:
    """Return the folders on this machine that pip's settings name as sources of packages.

    For an index, the result contains its parent folder, because the index's files may be next to it.
    """
    settings = pip_settings()
    found = {path for name in PLACES for path in _folders(settings.get(name, ""), is_index="INDEX" in name)}
    return sorted(str(path) for path in found if path.is_dir() and path != Path("/"))


def _folders(value: str, *, is_index: bool) -> Iterator[Path]:
    for word in value.split():
        if word.startswith("file:") or word.startswith("/"):
            path = Path(unquote(urlsplit(word).path))
            yield path.parent if is_index else path
