"""What the server inside a box is given: its files, with their digest, and what it makes each episode's place of."""

import functools
import hashlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SERVER = "/agentgym/server"
"""The server's folder inside a box."""
BRANCHES = "/branches"
"""The folder inside a box that holds the working folders of forked sessions."""
BOX_KILLED = 86
"""The exit code of a server that died of what the code in its box did; the server knows it too."""
SERVERS = 7
"""Processes of the server beside those of the code: its keeper, and the supervisor and first process of an episode, of
the next one, which has a worker too, and of a verifier."""
INODES_PER_MB = 256
"""Files and folders, for each MB of a folder in memory: they use the host's memory beside it, 1 KB each."""
BOX_USERS = range(200_000, 265_536)
"""The users of this machine as whom boxes run, one after the other where it can be chosen; they own nothing."""
_users = itertools.count(secrets.randbelow(len(BOX_USERS)))
PASSWD = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n"
GROUP = b"root:x:0:\nnogroup:x:65534:\n"


def next_user() -> int:
    """Return the user of a new box: what a box uses up of what the kernel gives each user is missing in no other."""
    return BOX_USERS[next(_users) % len(BOX_USERS)]


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


@functools.cache
def box_files() -> Mapping[str, bytes]:
    """Return the files of a box that are its own: the server, and the few of /etc that programs ask for."""
    found = {f"{SERVER}/{name}": text for name, text in server_files().items()}
    found |= {"/etc/passwd": PASSWD, "/etc/group": GROUP}
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime"):
        with suppress(OSError):
            found[path] = Path(path).read_bytes()
    return found


def arena(
    disk_mb: int, *, shared: Sequence[str] = (), users: bool = False, networked: bool = False
) -> Mapping[str, object]:
    """Return the part of a server's configuration by which it makes a new place for each episode.

    `shared` are folders of the host whose inodes it covers; `users` is whether it makes a user namespace of its own,
    `networked` whether what it seals shares the box's network.
    """
    return {
        "bytes": disk_mb << 20,
        "inodes": max(1024, disk_mb * INODES_PER_MB),
        "shared": shared,
        "users": users,
        "networked": networked,
    }
