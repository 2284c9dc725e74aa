"""The lock on a run's folder: one process at a time writes there."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentgym.errors import AgentGymError
from agentgym.foreign_files.opening import check_folder

LOCK = ".lock"
"""The file in the run's folder that its process holds locked and that holds the process's number."""


class FolderInUse(AgentGymError):
    """Another process runs in this folder; the message names the process."""


def make_folder(folder: Path) -> None:
    """Make the folder of `out` where it is not there; ValueError where that is not to be had."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "a file is in its way" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise ValueError(f"out: {folder} cannot be made ({what}); name another folder") from None


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold the folder for one run; FolderInUse where a running process holds it.

    The lock file is removed at the end. A process that is killed leaves the file, which the kernel unlocks, and the
    next run takes it over. Only processes that see the same file system's locks are told apart.
    """
    check_folder(folder)
    path = folder / LOCK
    file = _lock(path)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while the lock is held: nobody else's file has this name yet
        os.close(file)


def _lock(path: Path) -> int:
    """Open and lock the file; again where another process removed it between the two."""
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 20, 0).decode().strip() or "unknown"
            os.close(file)
            raise FolderInUse(
                f"out, resume: {path.parent} is in use by process {holder}; wait for its end, stop it, or name another "
                "folder"
            ) from None
        except BaseException:
            os.close(file)
            raise
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"out, resume: {path.parent} cannot be written to ({error.strerror}); give yourself the right to, or name "
            "another folder"
        ) from None
