"""The sandbox image: its name, its folders, and the check that an engine has it."""

from typing import TYPE_CHECKING, Any

from agentgym.errors import SandboxError
from agentgym.sandboxes.server_files import server_digest

if TYPE_CHECKING:
    import docker

IMAGE = "agentgym-sandbox"
"""The repository of sandbox images; an image's tag is the digest of the server inside it."""
SERVER_LABEL = "agentgym.server"
BUILD = "agentgym sandbox build"
INSIDE = "/run/agentgym"
"""Folder inside a container that contains the socket to which the server connects."""


def default_image() -> str:
    """Return the name of the image that contains this version's server."""
    return f"{IMAGE}:{server_digest()}"


def image_digest(client: "docker.APIClient", image: str) -> str:
    """Return the image's id.

    Raises:
        SandboxError: If the image is missing or contains another version's server; the message says how to build it.
    """
    from docker.errors import ImageNotFound

    try:
        found = client.inspect_image(image)  # type: ignore[no-untyped-call]
    except ImageNotFound as error:
        raise SandboxError(f"the Docker engine has no image {image!r}; build it with `{BUILD}`") from error
    server = (found["Config"]["Labels"] or {}).get(SERVER_LABEL)
    if server not in (None, server_digest()):
        raise SandboxError(
            f"the image {image!r} contains a server of a different agentgym version; rebuild it with `{BUILD}`"
        )
    return str(found["Id"])


def find(client: "docker.APIClient", image: str) -> dict[str, Any] | None:
    """Return the engine's description of an image, or None if the engine has no image of that name."""
    from docker.errors import ImageNotFound

    try:
        found: dict[str, Any] = client.inspect_image(image)  # type: ignore[no-untyped-call]
    except ImageNotFound:
        return None
    return found
