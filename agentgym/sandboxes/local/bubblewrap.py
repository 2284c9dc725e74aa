"""The bubblewrap command that creates a sandbox, which determines the parts of this machine that its code sees."""

import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentgym.errors import SandboxError
from agentgym.sandboxes.server_files import BRANCHES, next_user

PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64")
SETTINGS = ("alternatives", "ld.so.conf.d", "ssl/certs")
"""Folders of /etc that a sandbox sees.

The rest of /etc/ssl contains private keys, which one of this user's groups may be able to read.
"""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}


def interpreter_of(python: str | None) -> list[str]:
    system = "/usr/bin/python3"
    return [python or (system if Path(system).exists() else os.path.realpath(sys.executable)), "-I", "-S", "-B"]


def drop_root() -> list[str]:
    """Return a command prefix that changes root to a user id that no other sandbox has, or [] if this user isn't root.

    One sandbox then can't use up another's per-user kernel limits, root's files stay inaccessible, and the process
    limit holds.
    """
    if os.geteuid() != 0:
        return []
    user = str(next_user())
    return ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"]


def bwrap(interpreter: str, disk_bytes: int, files: Mapping[str, int], extra: Sequence[str]) -> list[str]:
    """Return the bubblewrap command with its options, without the program to run.

    For each episode, the server in the sandbox mounts fresh in-memory file systems. Those that bubblewrap mounts are
    used if the server can't do so.

    Args:
        interpreter: Path of the Python in the sandbox.
        disk_bytes: Size of each file system in memory.
        files: Descriptors of files to provide, keyed by path in the sandbox.
        extra: Further options, such as mounts.
    """
    memory = ("--size", str(disk_bytes), "--tmpfs")
    # /dev and / are in-memory file systems too: if left writable, they would carry files past a reset.
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1", "--new-session"),
        # Capabilities only in the sandbox's user namespace, and only for its keeper: processes that run code have
        # none.
        *("--cap-add", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *("--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "USER", "nobody", "--setenv", "LANG", "C.UTF-8", "--setenv", "TMPDIR", "/tmp"),
        *_read_only(interpreter),
        *extra,
        *("--proc", "/proc", "--tmpfs", "/dev"),
        *(word for name in DEVICES for word in ("--dev-bind-try", f"/dev/{name}", f"/dev/{name}")),
        *(word for name, to in LINKS.items() for word in ("--symlink", to, f"/dev/{name}")),
        *("--dir", "/dev/pts", "--mqueue", "/dev/mqueue"),
        *(word for path in ("/dev/shm", "/tmp", BRANCHES) for word in (*memory, path)),
        # Passed as data, because the user that the sandbox runs as may not be able to reach this package's folder.
        *(word for path, fd in files.items() for word in ("--ro-bind-data", str(fd), path)),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"),
    ]


def shared_folders() -> list[str]:
    """Return the host's folders that a sandbox sees."""
    below = [f"/{name}" for name in PROGRAMS] + [f"/etc/{name}" for name in SETTINGS]
    return ["/usr", *(path for path in below if Path(path).is_dir() and not Path(path).is_symlink())]


def _read_only(interpreter: str) -> list[str]:
    """Return the mounts of the host's programs and libraries, and of the few folders of /etc that they need."""
    binds = ["--ro-bind", "/usr", "/usr"]
    for name in PROGRAMS:
        path = Path("/", name)
        if path.is_symlink():
            binds += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            binds += ["--ro-bind", str(path), str(path)]
    for name in SETTINGS:
        binds += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if not interpreter.startswith("/usr/"):
        prefix = _prefix(interpreter)
        binds += ["--ro-bind", prefix, prefix]
    return binds


def _prefix(interpreter: str) -> str:
    """Return the folder of an interpreter's installation, the parent of its `bin`, to make it visible in a sandbox.

    Raises:
        SandboxError: If that is the root folder, or if a user's home is in it.
    """
    prefix = Path(interpreter).resolve().parents[1]
    homes = [Path(user.pw_dir) for user in pwd.getpwall() if user.pw_uid == 0 or user.pw_uid >= 1000]
    if prefix == Path("/") or any(home.is_relative_to(prefix) for home in homes if home != Path("/nonexistent")):
        raise SandboxError(
            f"python: {interpreter!r} would expose all of {str(prefix)!r} to the code in the sandbox, and a user's "
            "home is in it; install that Python into a separate folder, such as /opt/python"
        )
    return str(prefix)
