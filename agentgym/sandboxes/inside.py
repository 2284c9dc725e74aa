"""What goes into a box: where it lies on this machine, and a digest that changes with it."""

import functools
import hashlib
from pathlib import Path


def image_folder() -> Path:
    """The copy that the wheel installed, else the checkout's `sandbox/`."""
    installed = Path(__file__).parents[1] / "_image"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "sandbox"


@functools.cache
def server_source() -> bytes:
    """The server's text, as it was when it was first asked for."""
    return (image_folder() / "server.py").read_bytes()


def server_digest() -> str:
    """Twelve hex digits that change whenever the server does."""
    return hashlib.sha256(server_source()).hexdigest()[:12]
