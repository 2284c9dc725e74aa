"""Images of trajectories: files beside them, which their parts name, as ATIF has it since its version 1.6."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentgym.foreign_files.opening import read_bytes
from agentgym.messages import Image, image_of, is_image
from agentgym.messages.image import MAX_IMAGE_BYTES

FOLDER = "images"
"""The folder of the images, beside the trajectories."""


def without_details(content: Any) -> Any:
    """Return a content without the details of its images, for which ATIF has no field."""
    if not isinstance(content, list):
        return content
    return [{**part, "image_url": {"url": part["image_url"]["url"]}} if is_image(part) else part for part in content]


def take_out(document: dict[str, Any]) -> dict[str, bytes]:
    """Let the parts of a trajectory name files in place of their images, and return these files by name."""
    files: dict[str, bytes] = {}
    for _, holder, field in _contents(document):
        holder[field] = [_named(part, files) if is_image(part) else part for part in holder[field]]
    return files


def _named(part: Mapping[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    image = image_of(part)
    digest = hashlib.blake2b(image.data, digest_size=16).hexdigest()
    name = f"{FOLDER}/{digest}.{image.mime_type.removeprefix('image/')}"
    files[name] = image.data
    details = {name: value for name, value in part["image_url"].items() if name != "url"}
    return {"type": "image", "source": {"media_type": image.mime_type, "path": name}, **details}


def put_back(document: dict[str, Any], folder: Path) -> None:
    """Let the parts of a trajectory hold their images, which are read from files below its folder.

    :raises ValueError: for one that cannot be read; the message names the step and the file.
    """
    for place, holder, field in _contents(document):
        try:
            holder[field] = [_read(part, folder) for part in holder[field]]
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def _read(part: Any, folder: Path) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    source = part.get("source")
    name = source.get("path") if isinstance(source, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError("an image without source.path, which names its file")
    if "://" in name:
        raise ValueError(f"source.path: {name!r:.200} is not fetched; download it, and name the file")
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError(f"source.path: {name!r:.200} is not below the folder of the trajectory; put it there")
    try:
        made = Image(read_bytes(file, within=folder, most=MAX_IMAGE_BYTES)).part
    except OSError as error:
        raise ValueError(f"source.path: {name!r:.200} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"source.path: {name!r:.200}: {error}") from error
    details = {"detail": part["detail"]} if "detail" in part else {}
    return {**made, "image_url": {**made["image_url"], **details}}


def _contents(document: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield each place that may hold parts: the step, and the object and the field that hold them."""
    for number, step in enumerate(document["steps"], 1):
        results = (step.get("observation") or {"results": ()})["results"]
        places = [(step, "message"), *((result, "content") for result in results)]
        places += [(kept, "content") for one in (step, *results) if (kept := _kept(one)) is not None]
        yield from (
            (f"step {number}", holder, field) for holder, field in places if isinstance(holder.get(field), list)
        )
    for inner in document.get("subagent_trajectories") or ():
        yield from _contents(inner)


def _kept(one: Mapping[str, Any]) -> Any:
    """The whole message that agentgym put into the field `extra` of a step or a result."""
    ours = (one.get("extra") or {}).get("agentgym")
    kept = ours.get("message") if isinstance(ours, Mapping) else None
    return kept if isinstance(kept, dict) else None
