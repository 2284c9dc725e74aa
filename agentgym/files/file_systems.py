"""Properties of file systems: whether other machines share them, and whether they have locks."""

import ctypes
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

NO_LOCKS = frozenset((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP))
"""The system's error codes for a file system without locks."""
SHARED: Mapping[int, str] = {
    0x6969: "NFS",
    0x0BD00BD0: "Lustre",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
}
"""Names of file systems by their magic number in Linux. On each of them, it is possible that other machines write to
the same files, or that processes don't share the memory maps of a file.
"""


def shared_kind(folder: Path) -> str | None:
    """Return the kind of a folder's file system, such as NFS, if other machines may use it, otherwise None."""
    try:
        statfs = ctypes.CDLL(None, use_errno=True).statfs
    except AttributeError:  # Not Linux.
        return None
    found = ctypes.create_string_buffer(512)
    if statfs(os.fsencode(folder), found) != 0:
        return None
    return SHARED.get(ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF)


def has_locks(folder: Path, lock: Callable[[IO[bytes], int], object]) -> bool:
    """Return whether files in a folder can be locked; True if no file can be created there to find out.

    Args:
        folder: The folder.
        lock: Function that locks a file: `fcntl.flock`, or `fcntl.lockf`, which SQLite uses.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    return True
