"""Process identities: they name the owner of a folder or container, so that an ended owner's can be removed."""

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
"""Seconds without a `touch_folders` after which a folder of a process that cannot be seen from here is left over."""
State: TypeAlias = Literal["alive", "ended", "unknown"]


def owner() -> str:
    """Return the identity of this process, "host/boot/namespace/pid/start"; the host's name is for people only."""
    return "/".join((socket.gethostname(), *_identity()))


def state_of(who: str) -> State:
    """Say whether the process of this identity runs; "unknown" where it cannot be seen from here.

    It can be seen where this process has the same kernel, and the same process numbers, as the owner had. Names of
    hosts say nothing: containers share them, and a pod's changes.
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
    """Return a new empty folder that only this user may open; its name holds this process's identity.

    It is in the folder for temporary files unless `within` is another. The name is short: programs in an unsafe sandbox
    put unix sockets below it, and their paths hold 107 bytes.
    """
    return Path(tempfile.mkdtemp(prefix=f"{FOLDERS}{kind}-{_mark()}-", dir=within))


@contextmanager
def lent_folder(kind: str) -> Iterator[Path]:
    """Yield a new folder, which is locked while the block runs and removed at its end."""
    folder = new_folder(kind)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _try_lock(lock)
        yield folder
    finally:
        os.close(lock)
        remove_folder(folder)


def _try_lock(file: int) -> None:
    """Share the lock of a file; on a file system without locks the folder's own name says whose it is."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def remove_folder(folder: Path | str) -> None:
    """Remove a folder with all that is in it, however deep it is; what cannot be removed is left."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True)


def touch_folders() -> None:
    """Mark this process's folders as used now; whoever keeps one for longer than an hour calls it every minute."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*-{_mark()}-*"):
        try:
            os.utime(folder)
        except FileNotFoundError:
            continue  # It was removed meanwhile.


def dead_folders(within: Path | None = None) -> Iterator[Path]:
    """Yield the folders that ended processes left behind among the temporary files, or `within` another folder."""
    for folder in (within or Path(tempfile.gettempdir())).glob(f"{FOLDERS}*"):
        if _is_left(folder):
            yield folder


def sweep_folders() -> None:
    """Remove the folders that ended processes left behind, and mark this process's own as used."""
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
    """Whether nobody has touched the folder for long, and nobody holds its lock."""
    try:
        if time.time() - folder.stat().st_mtime < FORGOTTEN_S:
            return False
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False  # It is gone, or another user's.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _identity() -> tuple[str, str, str, str]:
    """This process's boot, process namespace, number and start; the namespace is "" where /proc is another one's."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid = Path("/proc/self").readlink()
    namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]") if int(str(pid)) == os.getpid() else ""
    return boot, namespace, str(pid), _started(str(pid)) or ""


def _mark() -> str:
    """The identity of `owner()` in a folder's name."""
    _, boot, namespace, pid, started = owner().split("/")
    short = f"{int(namespace):x}" if namespace.isdigit() else namespace
    return f"{hashlib.sha256(boot.encode()).hexdigest()[:8]}_{short}_{pid}_{started}"


def _runs(pid: str, started: str) -> bool:
    """Whether that process runs; also where the system hides it from this user."""
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
    """The start time of a process, in the kernel's ticks; None where no such process is seen."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
