"""Helpers that take disk space or folders away from a process that writes, using the system's own means."""

import errno
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size in bytes: a write beyond it fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def removed(folder: Path) -> None:
    """Remove a folder while a thread of this process may be writing to it."""
    while True:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return
