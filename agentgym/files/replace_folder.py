"""Replaces a folder with a new one, so that a process that dies leaves one of the two complete."""

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_CWD = -100
_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill, and move it to `path` when the block ends; if the block raises, nothing changes.

    Folders that dead processes left here are removed first. The parent folder must exist: a run's folder may be moved
    or removed at any time, and isn't recreated at its old path.
    """
    sweep(path)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        fresh.chmod(0o755)
        yield fresh
        _replace(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _replace(fresh: Path, path: Path) -> None:
    """Move `fresh` to `path` so that one of the two folders exists at every moment.

    On a file system that can't exchange two folders, a process that dies between two renames leaves the old folder
    under a hidden name, and `sweep` restores it.
    """
    if not path.exists():
        fresh.rename(path)
    elif not _exchange(fresh, path):
        old = fresh.with_name(f"{fresh.name}-old")
        path.rename(old)
        fresh.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def sweep(path: Path) -> None:
    """Remove the folders that dead processes left next to `path`.

    If a process died between moving the old folder away and moving the new one to `path`, the old one is moved back
    instead of removed.
    """
    ours = re.compile(rf"\.{re.escape(path.name)}-[a-z0-9_]{{8}}(-old)?")  # the form of mkdtemp's names
    for left in sorted(path.parent.glob(f".{path.name}-*")):
        found = ours.fullmatch(left.name)
        if found and found[1] and not path.exists():
            left.rename(path)
        elif found:
            shutil.rmtree(left, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step (Linux's renameat2) and return True.

    Return False, with nothing changed, if the system or the file system doesn't support that.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
