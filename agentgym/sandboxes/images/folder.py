"""Images of folders with a Dockerfile, built once for each content of the folder."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.errors import SandboxError
from agentgym.sandboxes.containers.image import SERVER_LABEL
from agentgym.sandboxes.images.build_log import BuildLog
from agentgym.sandboxes.images.pip_settings import pip_settings, proxy_settings
from agentgym.sandboxes.server_files import server_digest

if TYPE_CHECKING:
    import docker

ARGUMENTS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")
_STEP = re.compile(r"^ ?--+> ([0-9a-f]{11,12})\s*$")


def folder_digest(folder: Path) -> str:
    """Return a digest of the names, modes and contents below a folder; SandboxError where it holds no Dockerfile."""
    if not (folder / "Dockerfile").is_file():
        raise SandboxError(f"dockerfile: {str(folder)!r} is no folder with a file named Dockerfile in it")
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        mode = path.lstat().st_mode
        total.update(os.fsencode(f"{path.relative_to(folder)} {mode:o} {len(content)}\n") + content)
    return total.hexdigest()


def build_folder(
    client: "docker.APIClient",
    folder: Path,
    *,
    tag: str,
    arguments: Mapping[str, str] | None = None,
    labelled: bool = False,
) -> str:
    """Build the folder's Dockerfile under that name and return the image's id; SandboxError with the build's own words.

    No image without a name is left: neither of a build that failed, nor of the earlier stages of one. Proxies, and
    PIP_INDEX_URL and its kin where the Dockerfile declares them as ARG, are given as arguments of the build.
    `labelled` says that this Dockerfile brings the server.
    """
    carried = {name: value for name, value in pip_settings().items() if name in ARGUMENTS}
    said, made = BuildLog(), _Made()
    before = set(client.images(quiet=True, all=True))
    steps = client.build(
        path=str(folder),
        tag=tag,
        rm=True,
        forcerm=True,
        decode=True,
        buildargs={**proxy_settings(), **carried, **(arguments or {})},
        labels={SERVER_LABEL: server_digest()} if labelled else None,
        use_config_proxy=False,
    )
    said.read(made.words(steps))
    _remove_untagged(client, made.steps, before)
    if made.error is not None:
        raise SandboxError(f"the build of {str(folder)!r} failed: {made.error}\n{said}")
    return str(client.inspect_image(tag)["Id"])  # type: ignore[no-untyped-call]


class _Made:
    """What a build's stream of events says beside its words."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.steps: list[str] = []

    def words(self, events: Any) -> Iterator[str]:
        for event in events:
            if "error" in event:
                self.error = str(event["error"]).strip()
            elif "stream" in event:
                if step := _STEP.match(event["stream"].rstrip("\n")):
                    self.steps.append(step[1])
                yield event["stream"]
            elif event.get("status") and "progressDetail" not in event:
                yield f"{event['status']}\n"


def _remove_untagged(client: "docker.APIClient", steps: list[str], before: set[str]) -> None:
    """Remove the images of a build's steps, last first, that were not there `before` and that nothing stands on."""
    from docker.errors import APIError

    for step in reversed(steps):
        with suppress(APIError):  # Another image, or a tag, holds it.
            found = client.inspect_image(step)  # type: ignore[no-untyped-call]
            if not found["RepoTags"] and found["Id"] not in before:
                client.remove_image(step)
