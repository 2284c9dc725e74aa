"""Images for a model: their bytes, validated on creation."""

import base64
import binascii
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic_core import core_schema

MAX_IMAGE_BYTES = 20_000_000
"""Maximum size of one image in bytes; all known endpoints reject larger ones."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The media types that endpoints accept."""
DATA = "data:"
BASE64 = ";base64,"


def head_type(head: bytes) -> str | None:
    """Return an image's media type according to its first bytes, or None if it isn't one that endpoints accept."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def shown_size(size: int) -> str:
    """Return a number of bytes as short text: 345 bytes, 12 kB, 3.4 MB."""
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1000:.0f} kB" if size < 1_000_000 else f"{size / 1_000_000:.1f} MB"


@dataclass(frozen=True, slots=True, repr=False)
class Image:
    """An image for a vision model, in the content of a message or in a tool's result.

    ::

        Message(role="user", content=["How many cats?", ag.Image.from_path("cats.png")])

    Raises:
        ValueError: If the bytes aren't a PNG, JPEG, GIF or WebP, or are too many, or if `mime_type` doesn't match
            them; the message names the field.
    """

    data: bytes
    """The bytes of the file."""
    mime_type: str = ""
    """The media type, such as "image/png"; by default it is detected from the bytes."""

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes | bytearray | memoryview):
            what = type(self.data).__name__
            raise ValueError(f"data: must be bytes, got {what}; see ag.Image.from_path, from_pil and from_data_url")
        object.__setattr__(self, "data", bytes(self.data))
        if not self.data:
            raise ValueError("data: empty; give the bytes of an image")
        if len(self.data) > MAX_IMAGE_BYTES:
            much = f"{len(self.data):,} bytes, but at most {MAX_IMAGE_BYTES:,} are allowed"
            raise ValueError(f"data: {much}; make the image smaller")
        found = head_type(self.data)
        if found is None:
            raise ValueError(
                f"data: starts with {self.data[:8]!r}, so it isn't a PNG, JPEG, GIF or WebP; convert it, for example "
                "with Pillow's `save(file, format='PNG')`"
            )
        given = "image/jpeg" if self.mime_type == "image/jpg" else self.mime_type
        if given and given != found:
            raise ValueError(f"mime_type: {given!r:.80}, but the bytes are {found}; leave it out or use {found!r}")
        object.__setattr__(self, "mime_type", found)

    def __repr__(self) -> str:
        return f"<Image {self.mime_type}, {shown_size(len(self.data))}>"

    @classmethod
    def from_path(cls, path: str | Path) -> Self:
        """Return the image in a file.

        Args:
            path: The file.

        Raises:
            ValueError: If the file isn't a supported image; the message names the file.
            OSError: If the file can't be read.
        """
        data = Path(path).read_bytes()
        try:
            return cls(data)
        except ValueError as error:
            raise ValueError(f"path: {path}: {error}") from None

    @classmethod
    def from_pil(cls, image: Any, format: str = "PNG") -> Self:
        """Return the image of an object with Pillow's `save` method: `image.save(file, format=...)`.

        Args:
            image: A Pillow image or another object with such a method.
            format: The format to save it in.

        Raises:
            TypeError: If `image` has no such method.
        """
        if not callable(getattr(image, "save", None)):
            raise TypeError(f"image: must have a `save` method like Pillow's images, got {type(image).__name__}")
        file = io.BytesIO()
        image.save(file, format=format)
        return cls(file.getvalue())

    @classmethod
    def from_data_url(cls, url: str) -> Self:
        """Return the image of a data URL, such as "data:image/png;base64,iVBORw0...".

        Args:
            url: The data URL, encoded as base64.

        Raises:
            ValueError: If it isn't a data URL of a supported image.
        """
        if not isinstance(url, str) or not url.startswith(DATA):
            raise ValueError(
                f"url: must be a base64 data URL, such as 'data:image/png;base64,...', got {url!r:.80}; other URLs are "
                "not fetched, because images are stored with the rollout: download the file and use ag.Image(data)"
            )
        mime_type, mark, written = url[len(DATA) :].partition(BASE64)
        if not mark:
            raise ValueError(f"url: must contain {BASE64!r} after its media type, got {url!r:.80}")
        if mime_type not in (*IMAGE_TYPES, "image/jpg"):
            raise ValueError(f"url: its media type must be one of {', '.join(IMAGE_TYPES)}, got {mime_type!r:.80}")
        try:
            data = base64.b64decode(written, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"url: the part after {BASE64!r} is not base64 ({error}); is it truncated?") from None
        return cls(data, mime_type)

    @property
    def data_url(self) -> str:
        """The image as a data URL."""
        return f"{DATA}{self.mime_type}{BASE64}{base64.b64encode(self.data).decode('ascii')}"

    @property
    def part(self) -> Any:
        """The image as a content part in the OpenAI format."""
        return {"type": "image_url", "image_url": {"url": self.data_url}}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Support images as task fields, read from bytes, a data URL, {"bytes": ...} or a Pillow image."""
        written = core_schema.plain_serializer_function_ser_schema(lambda image: image.data_url)
        return core_schema.no_info_plain_validator_function(_as_image, serialization=written)


def _as_image(value: Any) -> Image:
    if isinstance(value, Image):
        return value
    if isinstance(value, str):
        return Image.from_data_url(value)
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return Image(value["bytes"])
    return Image.from_pil(value) if callable(getattr(value, "save", None)) else Image(value)
