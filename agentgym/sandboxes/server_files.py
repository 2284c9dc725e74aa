"""The files and settings of the server inside a sandbox, and the server's digest."""

import functools
import hashlib
import itertools
import json
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentgym.errors import SandboxError

SERVER = "/agentgym/server"
"""The server's folder inside a sandbox."""
BRANCHES = "/branches"
"""The folder inside a sandbox that contains the working folders of forked sessions."""
SANDBOX_KILLED = 86
"""Exit code of a server that ended because of the code in its sandbox; the server defines the same number."""
SERVERS = 5
"""Number of the server's processes, in addition to the code's.

They are its keeper, the supervisors of this episode and of the next one, and the first processes of two namespaces: the
session's and a verifier's.
"""
RESERVE = 64
"""Number of processes reserved for a verifier, however many of the code's processes are left running."""
INODES_PER_MB = 256
"""Maximum files and folders per MB of a folder in memory; each uses another 1 KB of the host's memory."""
SANDBOX_USERS = range(200_000, 265_536)
"""User ids on this machine that sandboxes run as, in turn, if the user can be chosen; they own nothing."""
_users = itertools.count(secrets.randbelow(len(SANDBOX_USERS)))
PASSWD = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n"
GROUP = b"root:x:0:\nnogroup:x:65534:\n"


def next_user() -> int:
    """Return the user id for a new sandbox.

    Sandboxes get different ids, so that one sandbox can't use up another's per-user kernel limits.
    """
    return SANDBOX_USERS[next(_users) % len(SANDBOX_USERS)]


def image_folder() -> Path:
    """Return the folder of the sandbox image: the one that the wheel installed, or else the checkout's `sandbox/`."""
    installed = Path(__file__).parents[1] / "_image"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "sandbox"


@functools.cache
def server_files() -> Mapping[str, bytes]:
    """Return the content of each of the server's files, keyed and sorted by name.

    The files are read once per process.
    """
    return {path.name: path.read_bytes() for path in sorted((image_folder() / "server").glob("*.py"))}


def server_digest() -> str:
    """Return twelve hex digits that change with the name or the content of any of the server's files."""
    total = hashlib.sha256()
    for name, text in server_files().items():
        total.update(f"{name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:12]


@functools.cache
def server_bytecode(python: tuple[str, ...]) -> bytes:
    """Return the bytecode of all server modules, compiled once per process by the sandboxes' Python interpreter.

    Args:
        python: The command that starts the interpreter.

    Raises:
        SandboxError: If the interpreter doesn't run, or can't compile the server.
    """
    asked = [[_module(name), f"{SERVER}/{name}", text.decode()] for name, text in server_files().items()]
    try:
        made = subprocess.run([*python, "-c", _COMPILE], input=json.dumps(asked).encode(), capture_output=True)
    except OSError as error:
        raise SandboxError(f"python: the sandboxes' interpreter does not run: {error}") from error
    if made.returncode:
        said = made.stderr.decode("utf-8", "replace").strip()[-500:]
        raise SandboxError(f"python: the sandboxes' interpreter cannot compile the server: {said}")
    return made.stdout


_COMPILE = """
import json, marshal, sys
codes = {name: compile(text, path, "exec") for name, path, text in json.load(sys.stdin)}
sys.stdout.buffer.write(marshal.dumps(codes))
"""


def _module(name: str) -> str:
    """Return the module name under which a server file is imported."""
    stem = name.removesuffix(".py")
    return "server" if stem == "__init__" else f"server.{stem}"


@functools.cache
def sandbox_files(python: tuple[str, ...]) -> Mapping[str, bytes]:
    """Return the files that each sandbox gets: the server, and the few files in /etc that programs look up.

    The server is packed into two files. Each file returned here becomes a mount, and every episode copies all mounts,
    so fewer files make an episode start faster.

    Args:
        python: The command that starts the sandboxes' interpreter, for which the server's bytecode is compiled.
    """
    found = {f"{SERVER}/__main__.py": server_files()["__main__.py"], f"{SERVER}/bytecode": server_bytecode(python)}
    found |= {"/etc/passwd": PASSWD, "/etc/group": GROUP}
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime", "/etc/ssl/openssl.cnf"):
        with suppress(OSError):
            found[path] = Path(path).read_bytes()
    return found


def arena(
    disk_mb: int,
    *,
    shared: Sequence[str] = (),
    users: bool = False,
    networked: bool = False,
    leads_out: bool = False,
) -> Mapping[str, object]:
    """Return the part of a server's configuration that describes the namespaces and folders of each episode.

    Args:
        disk_mb: Size of each folder in MB.
        shared: Folders of the host that the sandbox sees. The server mounts an overlay with separate inodes over each
            of them, so that file locks and watches on them are not shared with other sandboxes or the host.
        users: Whether the server creates a separate user namespace.
        networked: Whether the sandbox has internet sockets, at least for its loopback.
        leads_out: Whether the sandbox's network leads beyond the sandbox. If so, a cell with `fresh=True`,
            although hidden from the session, shares that network instead of getting a new one.
    """
    return {
        "bytes": disk_mb << 20,
        "inodes": max(1024, disk_mb * INODES_PER_MB),
        "shared": shared,
        "users": users,
        "networked": networked,
        "leads_out": leads_out,
    }
