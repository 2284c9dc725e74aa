"""The folder of the search indexes: in the user's cache, limited in size, and never in a run's folder."""

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from agentgym.files import names

log = logging.getLogger(__name__)

MOST_BYTES = 4 << 30
"""Total bytes that all indexes may have when a viewer starts. Beyond it, the least recently used ones are removed."""
KEPT_S = 60 * 24 * 3600.0
"""Seconds after which an unused index is removed."""
ENDS = ("", "-wal", "-shm")
"""Suffixes of the names of an index's files."""


def cache_folder() -> Path | None:
    """Return the folder of the indexes after removing old ones, or None if no folder is writable by this user alone.

    It is `agentgym/search` in $XDG_CACHE_HOME, or in ~/.cache.
    """
    try:
        folder = names.cache_folder("search")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError("the cache folder belongs to another user, or other users can write to it")
        sweep(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        log.warning("search indexes are stored in a temporary folder, for this viewer only: %s", error)
        return None
    return folder


def sweep(folder: Path) -> None:
    """Remove indexes that were not used for a long time, and the least recently used ones beyond the size limit."""
    left = MOST_BYTES
    for used, size, path in sorted(_indexes(folder), reverse=True):
        left -= size
        if left < 0 or time.time() - used > KEPT_S:
            remove(path)


def remove(path: Path) -> None:
    """Remove the files of an index; the next viewer to open it rebuilds it from the store."""
    for end in ENDS:
        with suppress(OSError):
            path.with_name(f"{path.name}{end}").unlink()


def _indexes(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each index was last used, its size and its path."""
    for path in folder.glob("*.sqlite"):
        with suppress(OSError):
            files = [of for end in ENDS if (of := path.with_name(f"{path.name}{end}")).exists()]
            found = [of.stat() for of in files]
            yield max(max(of.st_mtime, of.st_atime) for of in found), sum(of.st_size for of in found), path
