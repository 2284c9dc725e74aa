"""Images that agentgym created and no longer needs: those with another version's server, and those of killed builds."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentgym.sandboxes.docker.images.names import IMAGE, SERVER_LABEL
from agentgym.sandboxes.server_files import server_digest

if TYPE_CHECKING:
    import docker

NAMELESS_S = 3600.0
"""Age in seconds after which an unnamed image can't belong to a build that is still running."""


@dataclass(frozen=True, slots=True)
class Former:
    """An image that agentgym created and no longer needs."""

    id: str
    names: tuple[str, ...]
    size_mb: int
    """The image's full size in MB; if the image is removed, the part that it shares with other images remains."""

    def __str__(self) -> str:
        return f"image {', '.join(self.names) or 'without a name'} ({self.id[7:19]}, {self.size_mb} MB)"


def former_images(client: "docker.APIClient") -> list[Former]:
    """Return agentgym's unused images that have another version's server, or that have been unnamed for an hour.

    Images that a container uses, or that have a name given by the user, are not included.
    """
    used = {container["ImageID"] for container in client.containers(all=True)}
    found = [image for image in client.images(filters={"label": SERVER_LABEL}) if image["Id"] not in used]
    return [
        Former(image["Id"], _names(image), int(image["Size"]) >> 20)
        for image in sorted(found, key=lambda image: -int(image["Created"]))  # Newest first, as it may build on others.
        if _is_former(image)
    ]


def _is_former(image: dict[str, Any]) -> bool:
    server, names = image["Labels"][SERVER_LABEL], _names(image)
    if not server:
        return False  # Somebody has cleared the label that marks our server.
    if names:
        return server != server_digest() and all(name.startswith(f"{IMAGE}:") for name in names)
    return time.time() - int(image["Created"]) > NAMELESS_S


def _names(image: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in image["RepoTags"] or () if name != "<none>:<none>")


def remove_former(client: "docker.APIClient", image: Former) -> None:
    """Remove an image and all its names, as far as they still exist.

    If another image is built on this image, the image remains, and so does its last name.
    """
    from docker.errors import APIError, ImageNotFound

    for name in image.names or (image.id,):
        try:
            client.remove_image(name)
        except ImageNotFound:
            continue
        except APIError as error:
            if error.status_code != 409:  # Another image is built on it.
                raise
