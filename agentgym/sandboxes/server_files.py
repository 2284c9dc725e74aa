"""What the server inside a sandbox is given: its files, with their digest, and what it makes each episode's place
of."""

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
"""The folder inside a sandbox that holds the working folders of forked sessions."""
SANDBOX_KILLED = 86
"""The exit code of a server that died of what the code in its sandbox did; the server knows it too."""
SERVERS = 5
"""Processes of the server beside those of the code: its keeper, a supervisor and the next one, the first processes of
the session's namespace and of a verifier's."""
RESERVE = 64
"""Processes that a verifier has room for beside those of the code, however many of these are left."""
INODES_PER_MB = 256
"""Files and folders, for each MB of a folder in memory: they use the host's memory beside it, 1 KB each."""
SANDBOX_USERS = range(200_000, 265_536)
"""The users of this machine as whom sandboxes run, one after the other where it can be chosen; they own nothing."""
_users = itertools.count(secrets.randbelow(len(SANDBOX_USERS)))
PASSWD = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n"
GROUP = b"root:x:0:\nnogroup:x:65534:\n"


def next_user() -> int:
    """Return the user of a new sandbox: what a sandbox uses up of what the kernel gives each user is missing in no
    other."""
    return SANDBOX_USERS[next(_users) % len(SANDBOX_USERS)]


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
def server_bytecode(python: tuple[str, ...]) -> bytes:
    """Return all modules of the server as bytecode of the interpreter that this command starts.

    That interpreter makes it, once in a process. SandboxError where it does not run.
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
    """The name under which a file of the server is imported."""
    stem = name.removesuffix(".py")
    return "server" if stem == "__init__" else f"server.{stem}"


@functools.cache
def sandbox_files(python: tuple[str, ...]) -> Mapping[str, bytes]:
    """Return the files of a sandbox that are its own: the server, and the few of /etc that programs ask for.

    The server is two files, because each file here is a mount, which every episode's place copies.
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
    """Return the part of a server's configuration by which it makes a new place for each episode.

    `shared` are folders of the host whose inodes it covers; `users` is whether it makes a user namespace of its own,
    `networked` whether there are internet sockets, and `leads_out` whether what it seals shares the sandbox's network,
    because that leads to more than the sandbox itself.
    """
    return {
        "bytes": disk_mb << 20,
        "inodes": max(1024, disk_mb * INODES_PER_MB),
        "shared": shared,
        "users": users,
        "networked": networked,
        "leads_out": leads_out,
    }
