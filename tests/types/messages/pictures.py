"""Small images of each kind, for tests."""

import base64
from typing import Any

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""One pixel."""
GIF = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00\xff\xd9"
WEBP = b"RIFF\x1a\x00\x00\x00WEBPVP8L\x0d\x00\x00\x00\x2f\x00\x00\x00\x10\x07\x10\x11\x11\x88\x88\xfe\x07\x00"
OF_TYPE = {"image/png": PNG, "image/gif": GIF, "image/jpeg": JPEG, "image/webp": WEBP}
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
PART: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}
"""The pixel as a content part."""
SHOWN = f"[image/png, {len(PNG)} bytes]"
"""The placeholder for it."""


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a content part."""
    return {"type": "text", "text": text}
