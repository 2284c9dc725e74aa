"""Checks and mounts of host folders that sandboxes may read."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docker.types import Mount

TAKEN = ("/tmp", "/branches", "/dev", "/proc", "/sys", "/agentgym", "/run/agentgym")
"""Paths in a sandbox that are reserved."""


SYSTEMS = ("/proc", "/sys")
"""Folders that contain no files but expose a machine's devices and its processes with their environments."""


def check_volumes(volumes: Mapping[str, str], *, here: bool = True) -> None:
    """Raise a ValueError that names the path if a volume is not allowed.

    Both paths must be absolute and without "..". The path in the sandbox must not overlap a reserved path. The host's
    path must not be a socket, and must not expose the machine's root, devices or processes.

    Args:
        volumes: The host's paths, keyed by the paths in the sandbox.
        here: Whether the folders are on this machine; if so, they must exist, and links are resolved.
    """
    for inside, outside in volumes.items():
        for path in (inside, outside):
            if not path.startswith("/") or path.startswith("//") or "\0" in path or ".." in PurePosixPath(path).parts:
                raise ValueError(f"volumes: {path!r} is not an absolute path without '..'")
        if any(_overlap(inside, taken) for taken in TAKEN):
            raise ValueError(f"volumes: {inside!r} is reserved by the sandbox; choose another path, such as '/data'")
        if here and not Path(outside).exists():
            raise ValueError(f"volumes: {outside!r} does not exist on this machine, or this user has no access to it")
        if (shown := _shows_the_machine(outside, here=here)) is not None:
            raise ValueError(f"volumes: {outside!r} would expose {shown!r} of this machine to the code in the sandbox")
        if Path(outside).is_socket():
            raise ValueError(
                f"volumes: {outside!r} is a socket, through which code in the sandbox could talk to a server"
            )


def _shows_the_machine(outside: str, *, here: bool) -> str | None:
    """Return the system folder that this path would expose, or None.

    Args:
        outside: The host's path.
        here: Whether the path is on this machine; if so, links are resolved.
    """
    path = PurePosixPath(os.path.realpath(outside) if here else os.path.normpath(outside))
    if str(path) in ("/", "/dev"):
        return str(path)
    return next((system for system in SYSTEMS if path.is_relative_to(system)), None)


def check_sockets(volumes: Mapping[str, str]) -> None:
    """Raise a ValueError that names the socket if a volume contains one; each folder is walked once.

    In two cases, a read-only volume doesn't stop code in a sandbox from talking to the server that listens on such a
    socket: under gVisor, which opens the socket itself, and with a kernel that doesn't let a sandbox mount an overlay
    with separate inodes over the folder.
    """
    for outside in volumes.values():
        for path in _sockets(outside):
            raise ValueError(
                f"volumes: {outside!r} contains the socket {path!r}, through which code in the sandbox could talk to "
                "a server; choose a folder without sockets"
            )


def _sockets(folder: str) -> Iterator[str]:
    folders = [folder]
    while folders:
        # A folder this user can't list has nothing that a sandbox's user could find; a volume may also be a file.
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not (entry.is_file(follow_symlinks=False) or entry.is_symlink()) and Path(entry).is_socket():
                    yield entry.path


def _overlap(inside: str, taken: str) -> bool:
    """Return whether the paths are equal or one is inside the other."""
    one, other = PurePosixPath(inside), PurePosixPath(taken)
    return one.is_relative_to(other) or other.is_relative_to(one)


def read_only_mounts(volumes: Mapping[str, str]) -> "list[Mount]":
    """Return the read-only mounts of a container.

    If a path doesn't exist on the Docker engine's machine, the engine reports an error instead of creating a folder.
    Mounts below a path are left out, because they would stay writable.
    """
    from docker.types import Mount

    mounts = [Mount(inside, outside, type="bind", read_only=True) for inside, outside in volumes.items()]
    for mount in mounts:
        mount["BindOptions"] = {"NonRecursive": True}
    return mounts
