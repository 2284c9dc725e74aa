"""Images of trajectories, stored as files next to them and referenced by name, as ATIF does since version 1.6."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentgym.files.foreign.allowance import Allowance
from agentgym.files.foreign.opening import read_bytes, real_path, size_of
from agentgym.types.messages import Image, image_of, is_image
from agentgym.types.messages.image import MAX_IMAGE_BYTES

FOLDER = "images"
"""The folder of the images, next to the trajectories."""


def without_details(content: Any) -> Any:
    """Return message content without image details, for which ATIF has no field."""
    if not isinstance(content, list):
        return content
    return [{**part, "image_url": {"url": part["image_url"]["url"]}} if is_image(part) else part for part in content]


def take_out(document: dict[str, Any]) -> dict[str, bytes]:
    """Replace the images in a trajectory's parts with file names, and return these files by name."""
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


def put_back(document: dict[str, Any], folder: Path, allowance: Allowance) -> None:
    """Replace the file names in a trajectory's parts with the images, reading each file only once.

    For each reference, the size of its image as base64 text counts toward the allowance. Several references to one file
    count several times, because each of them is stored as text.

    Args:
        document: The trajectory, changed in place.
        folder: The trajectory's folder.
        allowance: Limit on the bytes read.

    Raises:
        ValueError: If an image can't be read or is outside the folder; the message names the step and the file.
    """
    files = _Files(folder, allowance)
    for place, holder, field in _contents(document):
        try:
            holder[field] = [_read(part, files) if _is_named(part) else part for part in holder[field]]
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


class _Files:
    """Reads the images of one trajectory."""

    def __init__(self, folder: Path, allowance: Allowance) -> None:
        self._folder, self._allowance = folder, allowance
        self._read: dict[Path, tuple[int, Any]] = {}
        """For each image file read so far, its size in bytes as base64 text, and its content part."""

    def part(self, name: str) -> Any:
        """Return the content part of an image file.

        Args:
            name: The file's name, relative to the trajectory's folder.

        Raises:
            ValueError: If the file is outside the folder.
            OSError: If it doesn't exist.
        """
        file = real_path(self._folder / name)
        if not file.is_relative_to(real_path(self._folder)):
            raise ValueError("it is not below the folder of the trajectory; move it there")
        if (known := self._read.get(file)) is not None:
            self._allowance.take(file, known[0])
            return known[1]
        size = size_of(file, within=self._folder)
        self._allowance.take(file, size * 4 // 3)
        part = Image(read_bytes(file, within=self._folder, most=min(size, MAX_IMAGE_BYTES))).part
        self._read[file] = size * 4 // 3, part
        return part


def _is_named(part: Any) -> bool:
    """Return whether a part names an image file."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def _read(part: Mapping[str, Any], files: _Files) -> Any:
    source = part.get("source")
    name = source.get("path") if isinstance(source, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError("an image has no source.path, which must name its file")
    if "://" in name:
        raise ValueError(
            f"source.path: {name!r:.200} is a URL, which is not fetched; download the image and name its file"
        )
    try:
        made = files.part(name)
    except OSError as error:
        raise ValueError(f"source.path: {name!r:.200} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"source.path: {name!r:.200}: {error}") from error
    details = {"detail": part["detail"]} if "detail" in part else {}
    return {**made, "image_url": {**made["image_url"], **details}}


def _contents(document: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """For each list of parts, yield the step's name, the object that has the list, and the name of its field."""
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
    """Return the whole message that agentgym stored in the `extra` field of a step or result, or None."""
    ours = (one.get("extra") or {}).get("agentgym")
    kept = ours.get("message") if isinstance(ours, Mapping) else None
    return kept if isinstance(kept, dict) else None
