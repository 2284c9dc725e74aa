"""Builds images from folders with a Dockerfile, once for each content of the folder."""

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.heartbeat import OWNER_LABEL
from agentgym.sandboxes.docker.images.build_log import BuildLog
from agentgym.sandboxes.docker.images.names import SERVER_LABEL
from agentgym.sandboxes.docker.images.packages import pip_settings, proxy_settings
from agentgym.sandboxes.server_files import server_digest

if TYPE_CHECKING:
    import docker

ARGUMENTS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")
END_S, PAUSE_S = 10.0, 0.1
_STEP = re.compile(r"^ ?--+> ([0-9a-f]{11,12})\s*$")


def folder_digest(folder: Path) -> str:
    """Return a digest of the names, modes and contents below a folder.

    Raises:
        SandboxError: If the folder contains no Dockerfile.
    """
    if not (folder / "Dockerfile").is_file():
        raise SandboxError(f"dockerfile: {str(folder)!r} is not a folder that contains a Dockerfile")
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
    labeled: bool = False,
) -> str:
    """Build the folder's Dockerfile and return the image's id.

    No unnamed images remain, neither from a failed or interrupted build nor from earlier stages. Proxies are passed
    as build arguments, and so are pip settings such as PIP_INDEX_URL if the Dockerfile declares them with ARG.

    Args:
        client: The engine's client.
        folder: The folder that contains the Dockerfile.
        tag: The image's name.
        arguments: Further build arguments; None for none.
        labeled: Whether to label the image as one that contains this version's server.

    Raises:
        SandboxError: If the build fails; the message contains the end of its output.
    """
    from docker.errors import APIError

    carried = {name: value for name, value in pip_settings().items() if name in ARGUMENTS}
    declared = declared_arguments((folder / "Dockerfile").read_text(errors="replace"))
    given = {**proxy_settings(), **{name: carried[name] for name in carried.keys() & declared}, **(arguments or {})}
    said, made = BuildLog(), _Made()
    before = set(client.images(quiet=True, all=True))
    answers: list[Any] = []
    client.hooks["response"].append(lambda answer, **_: answers.append(answer))
    try:
        steps = client.build(
            path=str(folder),
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            buildargs=given,
            labels={SERVER_LABEL: server_digest()} if labeled else None,
            use_config_proxy=False,
        )
    except APIError as error:  # The error's text contains the URL, whose arguments may include passwords.
        why = without_values(error.explanation or str(error.status_code), given)
        raise SandboxError(f"the build of {str(folder)!r} failed: {why}") from None
    finally:
        client.hooks["response"].pop()
    try:
        said.read(made.words(steps))
    except BaseException:
        for answer in answers:
            answer.close()  # An engine ends the build when its client disconnects.
        _wait_for_end(client, made.steps)
        raise
    finally:
        _remove_untagged(client, made.steps, before)
    if made.error is not None:
        why = without_values(f"{made.error}\n{said}", given)
        raise SandboxError(f"the build of {str(folder)!r} failed: {why}")
    return str(client.inspect_image(tag)["Id"])  # type: ignore[no-untyped-call]


def declared_arguments(dockerfile: str) -> set[str]:
    """Return the names that a Dockerfile declares with ARG.

    Of the user's pip settings, only those with such a name are sent to the engine.
    """
    joined = re.sub(r"\\\s*\n", " ", dockerfile)
    lines = [line.split() for line in joined.splitlines()]
    words = [word for line in lines if line and line[0].upper() == "ARG" for word in line[1:]]
    return {word.partition("=")[0] for word in words}


def without_values(text: str, arguments: Mapping[str, str]) -> str:
    """Return the text, with `***@` in place of the user names and passwords of URLs in the build arguments."""
    for value in arguments.values():
        for word in value.split():
            user, at, _ = urlsplit(word).netloc.rpartition("@")
            if at:
                text = text.replace(f"{user}@", "***@").replace(quote(f"{user}@", safe=""), "***@")
    return text


class _Made:
    """Reads a build's event stream: yields its output, and records its error and steps."""

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
    """Remove the unnamed images of a build's steps, the last one first.

    Images that existed `before`, or that another image is built on, remain. If the engine created an image on top of
    the last reported step but had not reported it yet, that image is removed, too.
    """
    from docker.errors import APIError

    with suppress(APIError):
        for step in dict.fromkeys([*_unsaid(client, steps, before), *reversed(steps)]):
            with suppress(APIError):  # Refused if it has a tag, or another image is built on it.
                found = client.inspect_image(step)  # type: ignore[no-untyped-call]
                if not found["RepoTags"] and found["Id"] not in before:
                    client.remove_image(step)


def _wait_for_end(client: "docker.APIClient", steps: list[str]) -> None:
    """Wait until no container of the build uses the image of the build's last step, but at most 10 seconds."""
    end, last = time.monotonic() + END_S, f"sha256:{steps[-1]}" if steps else None
    while last is not None and time.monotonic() < end:
        found = client.containers(all=True, filters={"ancestor": last})
        if not any(each["ImageID"].startswith(last) and OWNER_LABEL not in each["Labels"] for each in found):
            return
        time.sleep(PAUSE_S)


def _unsaid(client: "docker.APIClient", steps: list[str], before: set[str]) -> list[str]:
    """Return the ids of images that the engine created on top of the build's last reported step but hasn't reported."""
    last = f"sha256:{steps[-1]}" if steps else None
    found = client.images(all=True) if last else []
    return [image["Id"] for image in found if image["Id"] not in before and image["ParentId"].startswith(last)]
