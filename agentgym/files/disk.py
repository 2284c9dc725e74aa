"""Writing to a disk that may be full or broken: failed writes are counted and reported, and work continues."""

import errno
import os
import re
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

CODES = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE))
"""The system's error codes for a disk that is full, broken, or not writable."""
_OF_SQLITE = frozenset((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY))
SAID_AGAIN_S = 60.0
"""Seconds during which the same kind of trouble is reported only once."""
_IN_TEXT = re.compile(r"\[Errno (\d+)\]|os error (\d+)")  # Python's wording and Rust's


def disk_trouble(error: BaseException) -> str | None:
    """Return why a write to disk failed, such as "No space left on device", or None for any other error.

    An error may hide the system's own: the causes of the error are searched, too, and so are the texts of errors that
    torch and safetensors raise in its place.
    """
    for each in _with_causes(error, set()):
        if getattr(each, "sqlite_errorcode", 0) & 0xFF in _OF_SQLITE:
            return str(each)
        if (code := _code(each)) in CODES:
            return os.strerror(code)
    return None


def is_missing(error: BaseException) -> bool:
    """Return whether a file or folder was missing, for example because another process removed it."""
    return any(_code(each) == errno.ENOENT for each in _with_causes(error, set()))


def is_gone(path: Path) -> bool:
    """Return whether nothing exists at a path; False if that can't be determined, as when a server doesn't respond."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _code(error: BaseException) -> int:
    """Return the error code of the system in an error, or 0 if there is none.

    If a library raised its own error in place of the system's, the code is read from its text.
    """
    code = error.errno if isinstance(error, OSError) else None
    if code is None and (found := _IN_TEXT.search(str(error))):
        code = int(found[1] or found[2])
    return code or 0


def _with_causes(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield an error, its causes, and the errors grouped in it."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inside = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    for each in (error.__cause__, error.__context__, *inside):
        yield from _with_causes(each, seen)


class Refusals:
    """Writes files without which a run can continue, and counts the writes that failed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        """Number of failed writes by what was being written."""
        self._say = say
        self._said: dict[str, float] = {}

    def attempt(self, what: str, write: Callable[[], object], *, then: str) -> bool:
        """Call `write`, and return whether the disk accepted the data.

        A failure is reported at most once a minute, with its consequence. All other errors are raised.

        Args:
            what: Name of the written data, for reports and counts.
            write: Function that writes the data.
            then: The consequence of a failure, worded as the end of a sentence.
        """
        try:
            write()
        except Exception as error:
            if (why := disk_trouble(error)) is None:
                raise
            self.refused(what, why, then=then)
            return False
        return True

    def refused(self, what: str, why: str, *, then: str) -> None:
        """Count a failed write, and report it unless one of the same kind was reported in the last minute.

        Args:
            what: Name of the data that could not be written.
            why: The reason.
            then: The consequence, worded as the end of a sentence.
        """
        self.counts[what] += 1
        now = time.monotonic()
        if now - self._said.get(what, -SAID_AGAIN_S) >= SAID_AGAIN_S:
            self._said[what] = now
            self._say(f"{what} could not be written ({why}); {then}.")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: it ends up with all of its new content, or stays as it was.

    Args:
        path: The file.
        content: Its new content; text is encoded as UTF-8.

    Raises:
        OSError: If it can't be written; the error names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    fresh: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        fresh = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
        fresh.replace(path)
    except OSError as error:
        if fresh is not None:
            with suppress(OSError):
                fresh.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
