"""Opening of untrusted files: only regular ones, of a size that fits in memory."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from agentgym.errors import AgentGymError

MOST_BYTES = 128 << 20
"""Maximum size in bytes of a file that is read as a whole, unless the caller sets another."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


class UnreadableFileError(AgentGymError, ValueError):
    """A file can't be read safely, or isn't what it should be; the message names the file and the reason.

    A missing file is a FileNotFoundError instead.
    """


@contextmanager
def opened(path: Path, *, within: Path | None) -> Iterator[BinaryIO]:
    """Open a regular file for reading; refuse a pipe or a device without waiting for it.

    Args:
        path: The file.
        within: The folder that a symbolic link must not lead out of; None lets links lead anywhere.

    Raises:
        FileNotFoundError: If the file doesn't exist.
        UnreadableFileError: If it isn't a regular file, a link leads out of the folder, or the system denies access.
    """
    with os.fdopen(_descriptor(path, within), "rb") as file:
        yield file


def read_bytes(path: Path, *, within: Path | None, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes; the other arguments are those of `opened`.

    Raises:
        FileNotFoundError: If the file doesn't exist.
        UnreadableFileError: As in `opened`, or if the file is larger.
    """
    with opened(path, within=within) as file:
        try:
            if (size := os.fstat(file.fileno()).st_size) <= most:
                return file.read(size)
        except OSError as error:
            raise UnreadableFileError(f"{path} cannot be read ({error.strerror})") from error
    raise UnreadableFileError(f"{path} has {size:,} bytes, but the limit is {most:,}")


def size_of(path: Path, *, within: Path | None) -> int:
    """Return a regular file's size in bytes, including holes; arguments and errors are those of `opened`."""
    with opened(path, within=within) as file:
        return os.fstat(file.fileno()).st_size


def is_file(path: Path | str) -> bool:
    """Return whether the path is a regular file or a link to one; also False for a name that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a name that is too long


def real_path(path: Path) -> Path:
    """Return the absolute path of a file with links resolved, even if it is missing or its links form a cycle.

    Raises:
        UnreadableFileError: If no file can have this name.
    """
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error


def check_folder(folder: Path) -> None:
    """Raise UnreadableFileError if the folder contains a link that leads out of it, a pipe or a device.

    Call it before writing to a folder that may come from somebody else: writing through a link changes other files.
    """
    try:
        found = list(os.scandir(folder))
    except OSError:
        return
    for entry in found:
        if entry.is_symlink():
            real = os.path.realpath(entry.path)
            if not Path(real).is_relative_to(os.path.realpath(folder)):
                raise UnreadableFileError(
                    f"{entry.path} is a link that leads out of {folder}, to {real}; remove it (to write to "
                    "another disk, choose a folder there)"
                )
        elif not entry.is_file() and not entry.is_dir() and not stat.S_ISSOCK(entry.stat().st_mode):
            raise UnreadableFileError(f"{entry.path} is a pipe or a device, not a regular file; remove it")


def regular_file(path: Path, *, within: Path | None) -> Path:
    """Return the path of a regular file, with links resolved, for code that opens files itself.

    Raises:
        FileNotFoundError: If the file doesn't exist.
        UnreadableFileError: As in `opened`.
    """
    os.close(_descriptor(path, within))
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


def _descriptor(path: Path, within: Path | None) -> int:
    """Open a regular file after checking where its links lead, and return its file descriptor."""
    try:
        if within is not None and (path.parent != within or path.is_symlink()):
            real = Path(os.path.realpath(path))
            if not real.is_relative_to(os.path.realpath(within)):
                raise UnreadableFileError(f"{path} is a link that leads out of {within}, to {real}")
        else:
            real = path
        file = os.open(real, _READ | (os.O_NOFOLLOW if within is not None else 0))
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind != stat.S_IFREG:
        os.close(file)
        raise UnreadableFileError(f"{path} is {_KINDS.get(kind, 'a device')}, not a regular file")
    return file


def _refusal(path: Path, error: OSError | ValueError) -> Exception:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if isinstance(error, UnreadableFileError):
        return error
    if isinstance(error, OSError):
        reason = "a socket is not a regular file" if error.errno == errno.ENXIO else error.strerror
        return UnreadableFileError(f"{path} cannot be read ({reason})")
    return UnreadableFileError(f"{str(path)!r} cannot be read ({error})")  # a name that contains NUL
