"""Build the image that Docker boxes run: `python -m agentgym.sandboxes.image build`."""

import argparse
import logging
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker import IMAGE, SERVER_LABEL
from agentgym.sandboxes.local import image_folder, server_digest

if TYPE_CHECKING:
    from docker import DockerClient

SUITE = "bookworm"
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
_log = logging.getLogger("agentgym.sandboxes")


def build(tag: str = IMAGE, *, base: str | None = None, from_debootstrap: bool = False) -> str:
    """The id of the built image; SandboxError says why there is none.

    It stands on `base`, any image with a python3; without one on the Dockerfile's where its registry can be
    reached; else, or when told so, on a minimal Debian by debootstrap, which needs root and a package mirror.
    """
    import docker
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        client = docker.from_env(timeout=600)
        try:
            if base is not None:
                return _build_on(client, tag, {"BASE_IMAGE": base})
            return _build(client, tag, from_debootstrap=from_debootstrap)
        finally:
            client.close()
    except (DockerException, RequestException) as error:
        raise SandboxError(f"the Docker engine: {error}") from error


def _build(client: "DockerClient", tag: str, *, from_debootstrap: bool) -> str:
    from docker.errors import APIError, BuildError

    if not from_debootstrap:
        try:
            return _build_on(client, tag, {})
        except (APIError, BuildError) as error:
            _log.warning("the base image cannot be had (%s); building one with debootstrap", error)
    base = f"{tag}-base"
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
        raise SandboxError(f"{command[0]} is not installed") from error
    if done.returncode:
        raise SandboxError(f"{command[0]} failed: {(done.stderr or done.stdout)[-500:]}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m agentgym.sandboxes.image", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser("build", help="build the image")
    command.add_argument("--tag", default=IMAGE)
    command.add_argument("--base", metavar="IMAGE", help="what to build on; it needs a python3")
    command.add_argument("--from-debootstrap", action="store_true", help="a minimal Debian as base; needs root")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _log.info("%s", build(given.tag, base=given.base, from_debootstrap=given.from_debootstrap))


if __name__ == "__main__":
    main()
