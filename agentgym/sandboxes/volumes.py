"""Folders of the host that sandboxes may read."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docker.types import Mount

TAKEN = ("/tmp", "/branches", "/dev", "/proc", "/sys", "/agentgym", "/run/agentgym")
"""Paths of a sandbox that are its own."""


SYSTEMS = ("/proc", "/sys")
"""Folders of a machine that hold no files: they show its processes, with their environments, and its devices."""


def check_volumes(volumes: Mapping[str, str], *, here: bool = True) -> None:
    """Raise ValueError, which names the path, for one that is not absolute or stands where the sandbox has its own.

    Also for one that does not exist, where the folders are of this machine (`here`).
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
            raise ValueError(f"volumes: {outside!r} is a socket: code that can read a socket can talk to its server")


def _shows_the_machine(outside: str, *, here: bool) -> str | None:
    """Return the folder of the machine that no sandbox may see, if the path leads to one, by a link too if it is
    `here`."""
    path = PurePosixPath(os.path.realpath(outside) if here else os.path.normpath(outside))
    if str(path) in ("/", "/dev"):
        return str(path)
    return next((system for system in SYSTEMS if path.is_relative_to(system)), None)


def check_sockets(volumes: Mapping[str, str]) -> None:
    """Raise ValueError, which names it, for a socket in a folder that sandboxes are to see; it walks each folder once.

    Not every kind of sandbox keeps code from talking to the server of one: gVisor opens it, and so does a kernel that
    lets a sandbox have no inodes of its own in front of the folder.
    """
    for outside in volumes.values():
        for path in _sockets(outside):
            raise ValueError(
                f"volumes: {outside!r} contains the socket {path!r}: code that can read a socket can talk to its server; "
                "choose a folder without sockets"
            )


def _sockets(folder: str) -> Iterator[str]:
    folders = [folder]
    while folders:
        # What this user cannot list, or what is no folder, holds nothing that the user of a sandbox finds.
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not (entry.is_file(follow_symlinks=False) or entry.is_symlink()) and Path(entry).is_socket():
                    yield entry.path


def _overlap(inside: str, taken: str) -> bool:
    """Whether one of the paths is the other, or below it."""
    one, other = PurePosixPath(inside), PurePosixPath(taken)
    return one.is_relative_to(other) or other.is_relative_to(one)


def read_only_mounts(volumes: Mapping[str, str]) -> "list[Mount]":
    """Return the mounts of a container.

    A path that the engine's machine does not have is an error there, not a new folder; what is mounted below it is left
    out, for it would stay writable.
    """
    from docker.types import Mount

    mounts = [Mount(inside, outside, type="bind", read_only=True) for inside, outside in volumes.items()]
    for mount in mounts:
        mount["BindOptions"] = {"NonRecursive": True}
    return mounts
