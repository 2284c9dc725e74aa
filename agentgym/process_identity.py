"""Whose containers and folders these are, so that what a dead process left can be told from what is in use."""

import hashlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDERS = "agentgym-"


def owner() -> str:
    """This process, told apart from every other of this machine at any time: host/boot/pid/start."""
    pid = Path("/proc/self").readlink()
    return f"{socket.gethostname()}/{_boot()}/{pid}/{_started(str(pid))}"


def is_dead(who: str) -> bool:
    """Whether that owner has ended; False for what other machines own."""
    try:
        host, boot, pid, started = who.split("/")
    except ValueError:
        return False
    return host == socket.gethostname() and (boot != _boot() or _started(pid) != started)


def new_folder(kind: str) -> Path:
    """An empty folder of this process, for its user only, whose name says whose it is.

    The name is short: programs in an unsafe box put unix sockets below it, and their paths hold 107 bytes.
    """
    host, boot, pid, started = owner().split("/")
    return Path(tempfile.mkdtemp(prefix=f"{FOLDERS}{kind}-{_short(host)}_{_short(boot)}_{pid}_{started}-"))


@contextmanager
def lent_folder(kind: str) -> Iterator[Path]:
    """A new folder for as long as the block runs."""
    folder = new_folder(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def dead_folders() -> Iterator[Path]:
    """The folders that killed processes of this machine left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        if _is_dead_folder(folder.name):
            yield folder


def sweep_folders() -> None:
    """Remove them."""
    for folder in dead_folders():
        shutil.rmtree(folder, ignore_errors=True)


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
    """When the process started, in the kernel's ticks; None where there is none."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
