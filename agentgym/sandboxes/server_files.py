"""The files of the server inside a box: their folder on this machine, and their digest."""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

SERVER = "/agentgym/server"
"""The server's folder inside a box."""


def image_folder() -> Path:
    """Return the folder that the wheel installed, else the checkout's `sandbox/`."""
    installed = Path(__file__).parents[1] / "_image"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "sandbox"


@functools.cache
def server_files() -> Mapping[str, bytes]:
    """Return the text of each of the server's files by its name, sorted; it is read once in a process."""
    return {path.name: path.read_bytes() for path in sorted((image_folder() / "server").glob("*.py"))}


def server_digest() -> str:
    """Return twelve hex digits that change with the name or the text of any of the server's files."""
    total = hashlib.sha256()
    for name, text in server_files().items():
        total.update(f"{name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:12]
