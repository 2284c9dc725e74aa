"""A folder put in the place of another one, so that a process that dies leaves one of the two there."""

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
def written_whole(place: Path) -> Iterator[Path]:
    """A new folder to fill: it stands at `place` when the block ends, or nothing has changed where it raised.

    What processes that died here left behind is removed first.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    sweep(place)
    fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        fresh.chmod(0o755)
        yield fresh
        _replace(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _replace(fresh: Path, place: Path) -> None:
    """At every moment one of the two is at `place`.

    Where the file system cannot exchange two folders, a process that dies between two renames leaves the old one
    hidden, and `sweep` puts it back.
    """
    if not place.exists():
        fresh.rename(place)
    elif not _exchange(fresh, place):
        old = fresh.with_name(f"{fresh.name}-old")
        place.rename(old)
        fresh.rename(place)
        shutil.rmtree(old, ignore_errors=True)


def sweep(place: Path) -> None:
    """Remove what processes that died left beside `place`, after putting back what they had moved out of it."""
    ours = re.compile(rf"\.{re.escape(place.name)}-[a-z0-9_]{{8}}(-old)?")  # as mkdtemp names them
    for left in sorted(place.parent.glob(f".{place.name}-*")):
        found = ours.fullmatch(left.name)
        if found and found[1] and not place.exists():
            left.rename(place)
        elif found:
            shutil.rmtree(left, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the two in one step (renameat2 of Linux); False, and nothing done, where that cannot be done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
