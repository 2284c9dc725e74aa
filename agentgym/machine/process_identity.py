"""Process identities, which name the owner of a folder or container so that leftovers can be removed."""

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

FOLDERS = "agentgym-"
FORGOTTEN_S = 24 * 3600.0
"""Seconds without a `touch_folders` call after which the folder of a process that isn't visible here counts as left
over.
"""
State: TypeAlias = Literal["alive", "ended", "unknown"]


def owner() -> str:
    """Return this process's identity, "host/boot/namespace/pid/start".

    The host name is only for people: `state_of` ignores it.
    """
    return "/".join((socket.gethostname(), *_identity()))


def state_of(who: str) -> State:
    """Return whether the process with this identity runs, or "unknown" if it isn't visible from here.

    A process is visible if the current process has the same kernel and the same PID namespace. Host names aren't
    reliable: containers share them, and a pod's name changes.
    """
    try:
        _, boot, namespace, pid, started = who.split("/")
    except ValueError:
        return "unknown"
    here, numbers, *_ = _identity()
    if not numbers or (boot, namespace) != (here, numbers):
        return "unknown"
    return "alive" if _runs(pid, started) else "ended"


def new_folder(kind: str, within: Path | None = None) -> Path:
    """Create an empty folder that only this user can open, and return its path.

    Its name contains this process's identity. The name is short because programs in an unsafe sandbox put Unix
    sockets below the folder, and a socket's path is limited to 107 bytes.

    Args:
        kind: The kind of folder, which becomes part of the name.
        within: The parent folder. None means the folder for temporary files.
    """
    return Path(tempfile.mkdtemp(prefix=f"{FOLDERS}{kind}-{_mark()}-", dir=within))


@contextmanager
def lent_folder(kind: str) -> Iterator[Path]:
    """Yield a new folder that is removed when the block ends.

    Until then the folder is locked, so that no other process takes it for a leftover.
    """
    folder = new_folder(kind)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _try_lock(lock)
        yield folder
    finally:
        os.close(lock)
        remove_folder(folder)


def _try_lock(file: int) -> None:
    """Take a shared lock on a file.

    On a file system without locks, do nothing; the folder's name still identifies its owner.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def remove_folder(folder: Path | str) -> None:
    """Remove a folder and everything in it, however deep it is. Whatever can't be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True)


def touch_folders() -> None:
    """Mark this process's folders as recently used. Call it every minute if a folder is kept for over an hour."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*-{_mark()}-*"):
        try:
            os.utime(folder)
        except FileNotFoundError:
            continue  # It was removed in the meantime.


def dead_folders(within: Path | None = None) -> Iterator[Path]:
    """Yield the folders that ended processes left in `within`, by default the folder for temporary files."""
    for folder in (within or Path(tempfile.gettempdir())).glob(f"{FOLDERS}*"):
        if _is_left(folder):
            yield folder


def sweep_folders() -> None:
    """Remove the folders that ended processes left behind, and mark this process's own folders as used."""
    touch_folders()
    for folder in dead_folders():
        remove_folder(folder)


def _is_left(folder: Path) -> bool:
    mark = folder.name.rpartition("-")[0].rpartition("-")[2]
    try:
        boot, namespace, pid, started = mark.split("_")
    except ValueError:
        return False
    here, numbers, *_ = mine = _mark().split("_")
    if len(mine) == 4 and numbers and (boot, namespace) == (here, numbers):
        return not _runs(pid, started)
    return _is_forgotten(folder)


def _is_forgotten(folder: Path) -> bool:
    """Return whether no process has touched the folder for `FORGOTTEN_S` seconds and none holds its lock."""
    try:
        if time.time() - folder.stat().st_mtime < FORGOTTEN_S:
            return False
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False  # It is gone or belongs to another user.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _identity() -> tuple[str, str, str, str]:
    """Return this process's boot id, PID namespace, PID and start time.

    The namespace is "" if /proc belongs to another namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid = Path("/proc/self").readlink()
    namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]") if int(str(pid)) == os.getpid() else ""
    return boot, namespace, str(pid), _started(str(pid)) or ""


def _mark() -> str:
    """Return the identity of `owner()` in the form used in folder names."""
    _, boot, namespace, pid, started = owner().split("/")
    short = f"{int(namespace):x}" if namespace.isdigit() else namespace
    return f"{hashlib.sha256(boot.encode()).hexdigest()[:8]}_{short}_{pid}_{started}"


def _runs(pid: str, started: str) -> bool:
    """Return whether that process runs, even if the system hides it from this user."""
    found = _started(pid)
    if found is not None:
        return found == started
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return _started(pid) == started


def _started(pid: str) -> str | None:
    """Return a process's start time in kernel ticks, or None if no such process is visible."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
