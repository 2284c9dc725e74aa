"""Images that a model is shown: their bytes, checked when they are made."""

import base64
import binascii
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic_core import core_schema

MAX_IMAGE_BYTES = 20_000_000
"""The most bytes of one image: more is refused by every endpoint that is known."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The media types that endpoints take."""
DATA = "data:"
BASE64 = ";base64,"


def head_type(head: bytes) -> str | None:
    """Return the media type of an image by its first bytes; None where they are of no image that endpoints take."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def shown_size(size: int) -> str:
    """Return a number of bytes in a few characters: 345 bytes, 12 kB, 3.4 MB."""
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1000:.0f} kB" if size < 1_000_000 else f"{size / 1_000_000:.1f} MB"


@dataclass(frozen=True, slots=True, repr=False)
class Image:
    """Holds an image for a model that sees: in the content of a message, or in what a tool returns.

    ::

        Message(role="user", content=["How many cats?", ag.Image.from_path("cats.png")])

    :raises ValueError: for bytes that are no PNG, JPEG, GIF or WebP, or too many; the message names the field.
    """

    data: bytes
    """The bytes of the file."""
    mime_type: str = ""
    """The media type, such as "image/png"; by default it is read from the bytes."""

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes | bytearray | memoryview):
            what = type(self.data).__name__
            raise ValueError(f"data: must be bytes, got {what}; see ag.Image.from_path, from_pil and from_data_url")
        object.__setattr__(self, "data", bytes(self.data))
        if not self.data:
            raise ValueError("data: empty; give the bytes of an image")
        if len(self.data) > MAX_IMAGE_BYTES:
            much = f"{len(self.data):,} bytes, and at most {MAX_IMAGE_BYTES:,} are sent"
            raise ValueError(f"data: {much}; make the image smaller")
        found = head_type(self.data)
        if found is None:
            raise ValueError(
                f"data: begins with {self.data[:8]!r}, as no PNG, JPEG, GIF or WebP does; convert it, with Pillow's "
                "`save(file, format='PNG')` for instance"
            )
        given = "image/jpeg" if self.mime_type == "image/jpg" else self.mime_type
        if given and given != found:
            raise ValueError(f"mime_type: {given!r:.80}, and the bytes are {found}; leave it out, or give {found!r}")
        object.__setattr__(self, "mime_type", found)

    def __repr__(self) -> str:
        return f"<Image {self.mime_type}, {shown_size(len(self.data))}>"

    @classmethod
    def from_path(cls, path: str | Path) -> Self:
        """Return the image of a file; ValueError, naming the file, where it holds none."""
        data = Path(path).read_bytes()
        try:
            return cls(data)
        except ValueError as error:
            raise ValueError(f"path: {path}: {error}") from None

    @classmethod
    def from_pil(cls, image: Any, format: str = "PNG") -> Self:
        """Return the image of anything that saves itself as Pillow's do: `image.save(file, format=...)`.

        :raises TypeError: for what has no such method.
        """
        if not callable(getattr(image, "save", None)):
            raise TypeError(f"image: must have a method `save`, as Pillow's images have, got {type(image).__name__}")
        file = io.BytesIO()
        image.save(file, format=format)
        return cls(file.getvalue())

    @classmethod
    def from_data_url(cls, url: str) -> Self:
        """Return the image of a data URL, such as "data:image/png;base64,iVBORw0..."; ValueError for any other URL."""
        if not isinstance(url, str) or not url.startswith(DATA):
            raise ValueError(
                f"url: must be a data URL of base64, such as 'data:image/png;base64,...', got {url!r:.80}; nothing is "
                "fetched: what a model saw must stay with its rollout. Download it, and give ag.Image(data)"
            )
        mime_type, mark, written = url[len(DATA) :].partition(BASE64)
        if not mark:
            raise ValueError(f"url: must hold {BASE64!r} after its media type, got {url!r:.80}")
        if mime_type not in (*IMAGE_TYPES, "image/jpg"):
            raise ValueError(f"url: its media type must be one of {', '.join(IMAGE_TYPES)}, got {mime_type!r:.80}")
        try:
            data = base64.b64decode(written, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"url: the part after {BASE64!r} is not base64 ({error}); is it cut off?") from None
        return cls(data, mime_type)

    @property
    def data_url(self) -> str:
        """The image as a data URL."""
        return f"{DATA}{self.mime_type}{BASE64}{base64.b64encode(self.data).decode('ascii')}"

    @property
    def part(self) -> Any:
        """The image as a part of a content, in OpenAI's shape."""
        return {"type": "image_url", "image_url": {"url": self.data_url}}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Let a task have an image as a field, read from bytes, a data URL, {"bytes": ...}, or an image of Pillow's."""
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
