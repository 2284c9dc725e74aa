"""What goes into a box: where it lies on this machine, and a digest that changes with it."""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

SERVER = "/agentgym/server"
"""The server's folder inside a box."""


def image_folder() -> Path:
    """The copy that the wheel installed, else the checkout's `sandbox/`."""
    installed = Path(__file__).parents[1] / "_image"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "sandbox"


@functools.cache
def server_files() -> Mapping[str, bytes]:
    """The text of each of the server's files by its name, sorted, as it was when it was first asked for."""
    return {path.name: path.read_bytes() for path in sorted((image_folder() / "server").glob("*.py"))}


def server_digest() -> str:
    """Twelve hex digits that change whenever a file of the server does, or its name."""
    total = hashlib.sha256()
    for name, text in server_files().items():
        total.update(f"{name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:12]
