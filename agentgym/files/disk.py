"""Writing to a disk that may be full or broken: what cannot be written is counted and reported, and work goes on."""

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
"""Seconds in which one kind of trouble is reported only once."""
_IN_TEXT = re.compile(r"\[Errno (\d+)\]|os error (\d+)")  # of Python, and of what is written in Rust


def disk_trouble(error: BaseException) -> str | None:
    """Return why something could not be written to disk, such as "No space left on device"; None for any other error.

    The causes of the error are checked too, as are the errors that torch and safetensors make of the system's.
    """
    for each in _with_causes(error, set()):
        if getattr(each, "sqlite_errorcode", 0) & 0xFF in _OF_SQLITE:
            return str(each)
        if (code := _code(each)) in CODES:
            return os.strerror(code)
    return None


def is_missing(error: BaseException) -> bool:
    """Whether a file or a folder was not there, such as one that somebody else has removed."""
    return any(_code(each) == errno.ENOENT for each in _with_causes(error, set()))


def is_gone(path: Path) -> bool:
    """Whether there is nothing at a path; False also if that cannot be told, as when a server does not answer."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _code(error: BaseException) -> int:
    """Return the system's code of an error, also of one that a library has made of the system's; 0 if it has none."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None and (found := _IN_TEXT.search(str(error))):
        code = int(found[1] or found[2])
    return code or 0


def _with_causes(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield an error, its causes, and those that are inside it."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inside = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    for each in (error.__cause__, error.__context__, *inside):
        yield from _with_causes(each, seen)


class Refusals:
    """Writes files that the work can go on without, and counts those that could not be written."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        """How often something could not be written, by what it was."""
        self._say = say
        self._said: dict[str, float] = {}

    def attempt(self, what: str, write: Callable[[], object], *, then: str) -> bool:
        """Write something, and return whether the disk took it.

        If it did not, report that at most once a minute, with what happens `then`. All other errors are raised.

        Args:
            what: What is written, as reports and counts name it.
            write: Writes it.
            then: What happens if it cannot be written, as the end of a sentence.
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
        """Count something that could not be written, and report it unless that was done in the last minute."""
        self.counts[what] += 1
        now = time.monotonic()
        if now - self._said.get(what, -SAID_AGAIN_S) >= SAID_AGAIN_S:
            self._said[what] = now
            self._say(f"{what} could not be written ({why}); {then}.")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as a whole: afterward it has all of its new content, or is as it was before.

    Raises:
        OSError: It cannot be written; the error names the file.
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
