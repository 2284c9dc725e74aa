"""Process identities: they name the owner of a folder or container, so that a dead owner's can be removed."""

import hashlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDERS = "agentgym-"


def owner() -> str:
    """Return the identity of this process, "host/boot/pid/start": no other process ever has the same."""
    pid = Path("/proc/self").readlink()
    return f"{socket.gethostname()}/{_boot()}/{pid}/{_started(str(pid))}"


def is_dead(who: str) -> bool:
    """Whether the process of this identity has ended; False for a process of another machine."""
    try:
        host, boot, pid, started = who.split("/")
    except ValueError:
        return False
    return host == socket.gethostname() and (boot != _boot() or _started(pid) != started)


def new_folder(kind: str) -> Path:
    """Return a new empty folder that only this user may open; its name holds this process's identity.

    The name is short: programs in an unsafe box put unix sockets below it, and their paths hold 107 bytes.
    """
    host, boot, pid, started = owner().split("/")
    return Path(tempfile.mkdtemp(prefix=f"{FOLDERS}{kind}-{_short(host)}_{_short(boot)}_{pid}_{started}-"))


@contextmanager
def lent_folder(kind: str) -> Iterator[Path]:
    """Yield a new folder, which is removed at the end of the block."""
    folder = new_folder(kind)
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: str | Path) -> None:
    """Remove a folder, however deep it is; what cannot be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def dead_folders() -> Iterator[Path]:
    """Yield the folders that dead processes of this machine left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        if _is_dead_folder(folder.name):
            yield folder


def sweep_folders() -> None:
    """Remove the folders that dead processes of this machine left behind."""
    for folder in dead_folders():
        remove_folder(folder)


def _is_dead_folder(name: str) -> bool:
    mark = name.rpartition("-")[0].rpartition("-")[2]
    try:
        host, boot, pid, started = mark.split("_")
    except ValueError:
        return False
    return host == _short(socket.gethostname()) and (boot != _short(_boot()) or _started(pid) != started)


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: str) -> str | None:
    """The start time of a process, in the kernel's ticks; None where no such process runs."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
