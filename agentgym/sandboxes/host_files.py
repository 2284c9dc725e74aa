"""Bounded copies of this machine's files into a sandbox and back, without following links."""

import errno
import os
import secrets
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Self

from agentgym.files.disk import CODES

MAX_FILES = 10_000
MAX_DEPTH = 100
"""Maximum depth of a folder copied out of a sandbox.

Deeper folders are refused because code that later removes the copy, such as `shutil.rmtree`, is recursive.
"""
IN_MEMORY = 16 << 20
"""Maximum bytes of a copy in memory; larger copies are buffered on disk."""
PIECE = 1 << 20
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
"""Bytes at the end of every tar file."""
IN_THE_WAY = {
    errno.EEXIST: "a link or a file",
    errno.ENOTDIR: "a link or a file",
    errno.ELOOP: "a link",
    errno.EISDIR: "a folder",
    errno.ENXIO: "a pipe, a socket or a device",
}
"""What is at a path of this machine where something else must be stored, by the error's number."""


class HostSource(NamedTuple):
    """A file on this machine, and its path in a sandbox."""

    path: str
    source: Path
    size: int
    executable: bool


class HostFile(NamedTuple):
    """A file that was copied from a sandbox into a `Spool`, where its content is the `size` bytes from `start`.

    `path` is relative to the folder on this machine into which the files go. It is "" for a single file,
    which becomes the target itself.
    """

    path: str
    start: int
    size: int
    executable: bool


class Spool:
    """A buffer for files copied from a sandbox, until all have arrived and can be stored at the target.

    It is in memory, or in an unnamed file near the target if it is large.
    """

    def __init__(self, target: Path) -> None:
        self._beside = next(folder for folder in (*target.absolute().parents, Path("/")) if folder.is_dir())
        self._content = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY, dir=str(self._beside))  # noqa: SIM115  # Closed at the end.
        self.files: list[HostFile] = []
        self.folders: list[str] = []
        """The paths of the folders, relative to the target folder; "" for the target itself."""
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append bytes; if they don't fit on the disk, the OSError names the folder of the unnamed file."""
        with _filling(self._beside, self._beside):
            self._content.write(data)
        self.size += len(data)

    def add(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Append a whole file."""
        self.files.append(HostFile(path, self.size, len(content), executable))
        self.write(content)

    def copy(self, file: HostFile, out: BinaryIO) -> None:
        """Copy one of the spool's files to `out`."""
        self._content.seek(file.start)
        left = file.size
        while piece := self._content.read(min(left, PIECE)):
            out.write(piece)
            left -= len(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with _filling(self._beside, self._beside):  # closing writes what is still buffered
            self._content.close()


def find_files(source: Path, target: str) -> list[HostSource]:
    """Return the file, or each file in the folder, with its path below `target` in the sandbox.

    Raises:
        ValueError: If the source is or contains a link, a pipe or a device, or contains over 10,000 files.
    """
    found: list[HostSource] = []
    for path in _files(source):
        if len(found) == MAX_FILES:
            raise ValueError(
                f"source: {str(source)!r} contains over {MAX_FILES} files; copy it as a tar archive with sandbox.unpack"
            )
        info = path.lstat()
        below = path.relative_to(source)
        inside = PurePosixPath(target, below) if below.parts else PurePosixPath(_file_target(source, target))
        found.append(HostSource(str(inside), path, info.st_size, bool(info.st_mode & stat.S_IXUSR)))
    return found


def batches(files: Sequence[HostSource], most: int, large: int) -> Iterator[list[HostSource]]:
    """Yield the files in groups that are small enough to be copied together.

    Args:
        files: The files.
        most: Maximum number of files in a group.
        large: A file with more than this many bytes is alone in its group. Any other group has at most four times
            this many bytes.
    """
    group: list[HostSource] = []
    size = 0
    for file in files:
        if group and (max(file.size, group[0].size) > large or len(group) == most or size > 3 * large):
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield group


def load(files: Sequence[HostSource]) -> dict[str, bytes]:
    """Return the files' contents, keyed by path in the sandbox.

    Of a file that has grown since `find_files` found it, only the bytes up to its size at that time are returned.
    """
    contents = {}
    for file in files:
        with open_file(file.source, "source") as content:
            contents[file.path] = content.read(file.size)
    return contents


def open_file(path: Path, field: str) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The file.
        field: Name of the caller's argument that contains the path, for the error message.

    Raises:
        OSError: If the path is a link.
        ValueError: If it is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise ValueError(f"{field}: {str(path)!r} is a folder, a pipe or a device; give a regular file")


def open_snapshot(path: Path) -> BinaryIO:
    """Open a file that `Sandbox.snapshot` has written, for reading.

    Raises:
        ValueError: If the file is not a snapshot or is truncated; the message says what is wrong.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") if not path.is_dir() else None
    why = "it is a folder" if file is None else _why_no_snapshot(file)
    if file is None or why:
        if file is not None:
            file.close()
        raise ValueError(f"path: {str(path)!r} is not a snapshot: {why}; make one with `sandbox.snapshot(path)`")
    return file


def _why_no_snapshot(file: BinaryIO) -> str:
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode):
        return "it is not a regular file"
    if not info.st_size:
        return "it is empty"
    first = file.read(tarfile.BLOCKSIZE)
    try:
        if any(first):
            tarfile.TarInfo.frombuf(first, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return "it does not begin like a tar file"
    file.seek(max(info.st_size - len(TAR_END), 0))
    if info.st_size % tarfile.BLOCKSIZE or file.read() != TAR_END:
        return f"it is truncated after {info.st_size} bytes"
    file.seek(0)
    return ""


@contextmanager
def new_file(target: Path, field: str) -> Iterator[BinaryIO]:
    """Yield a file that replaces `target` if the `with` block succeeds, and is deleted otherwise.

    Until then, the file has no name, so a killed process leaves nothing behind. If the file system doesn't support
    unnamed files, the file has a hidden name.

    Args:
        target: The path of the file.
        field: Name of the caller's argument that contains the path, for the error message.

    Raises:
        FileExistsError: If a link or a file is where a folder of the path is needed.
        IsADirectoryError: If `target` is a folder.
        OSError: If the file can't be stored for another reason, for example on a full disk; the error names it.
    """
    if target.is_dir():
        raise IsADirectoryError(f"{field}: {str(target)!r} is a folder; give the path of a file")
    with _naming(target.parent, field=field):
        target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f".{secrets.token_hex(16)}")
    try:
        with _filling(target, target.parent), _nameless(target.parent) or hidden.open("xb") as file:
            yield file
            file.flush()
            if os.fstat(file.fileno()).st_nlink == 0:
                # The folder descriptor has no other effect, but without one, Python doesn't follow the link.
                os.link(f"/proc/self/fd/{file.fileno()}", hidden, src_dir_fd=file.fileno(), follow_symlinks=True)
        hidden.replace(target)
    finally:
        with suppress(OSError):  # usually missing; on a read-only disk, this error would replace the one above
            hidden.unlink()


@contextmanager
def _filling(path: Path, folder: Path) -> Iterator[None]:
    """Have an OSError of a full or broken disk in the `with` block name the path instead of a temporary file.

    An error that names a file outside of `folder`, in which the temporary file is, stays as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno in CODES and (error.filename is None or Path(error.filename).parent == folder):
            error.filename = str(path)
        raise


def _nameless(folder: Path) -> BinaryIO | None:
    """Return an unnamed file in the folder, or None if its file system doesn't support unnamed files."""
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError:
        return None


def _files(source: Path) -> Iterator[Path]:
    left = [source]
    while left:
        path = left.pop()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            left += sorted(path.iterdir(), reverse=True)
        elif stat.S_ISREG(mode):
            yield path
        else:
            raise ValueError(f"source: {str(path)!r} is a link, a pipe or a device; copy only files and folders")


def _file_target(source: Path, target: str) -> str:
    """Return the path in the sandbox for a single file that is copied.

    It is `target`, or the file's name below `target` if that is "", "." or ends with a slash.
    """
    if target in ("", "."):
        return source.name
    return f"{target}{source.name}" if target.endswith("/") else target


def store_tree(target: Path, spool: Spool) -> None:
    """Store a spool's folders and files at `target`; if one of their paths leads out of `target`, create nothing.

    Raises:
        FileExistsError: If a link is in the way, or if a file is where a folder is needed, or the reverse.
        OSError: If a file or folder can't be stored for another reason, such as a full disk; the error names it.
        ValueError: If a path does not consist of names separated by slashes, or if the spool contains a single file
            but `target` can only be a folder, such as ".".
    """
    # A target that doesn't end in a name, such as "." or "..", is itself the folder that the caller means.
    top, first = (target.parent, [target.name]) if is_name(target.name) else (target, [])
    paths = [[*first, *_names(file.path, target)] for file in spool.files]
    if not all(paths):
        raise ValueError(f"target: {str(target)!r} is a folder; give the path of a file, since the source is a file")
    for folder in [[*first, *_names(path, target)] for path in spool.folders]:
        with _folder_below(top, folder):
            pass
    for parts, file in zip(paths, spool.files, strict=True):
        _store(top, parts, spool, file)


@contextmanager
def _folder_below(top: Path, parts: Sequence[str]) -> Iterator[int]:
    """Yield a descriptor of the folder at `parts` below `top`, which is created, with its parents, if missing."""
    with _naming(top):
        top.mkdir(parents=True, exist_ok=True)
        folder = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for depth, part in enumerate(parts, 1):
            with _naming(top, *parts[:depth]):
                folder = _enter(folder, part)
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _naming(top: Path, *parts: str, field: str = "target") -> Iterator[None]:
    """Turn an OSError in the `with` block into one that names the whole path and what is in its way, if anything.

    `field` is the name of the caller's argument that contains the path.
    """
    try:
        yield
    except OSError as error:
        path = top.joinpath(*parts)
        if error.errno in IN_THE_WAY:
            raise FileExistsError(
                f"{field}: {IN_THE_WAY[error.errno]} is in the way of {str(path)!r}; remove it or give another path"
            ) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_name(name: str) -> bool:
    """Return whether this is a single path component that stays in its folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _names(path: str, target: Path) -> list[str]:
    """Return the components of a path that is relative to `target`; "", the target itself, has none.

    Raises:
        ValueError: If a component is empty, "." or "..", or contains a null character; the message names `target`.
    """
    names = path.split("/") if path else []
    if not all(map(is_name, names)):
        raise ValueError(f"{path!r} leads out of {str(target)!r}, or is not a valid path")
    return names


def _store(top: Path, parts: Sequence[str], spool: Spool, file: HostFile) -> None:
    mode = 0o755 if file.executable else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    with (
        _folder_below(top, parts[:-1]) as folder,
        _naming(top, *parts),
        os.fdopen(os.open(parts[-1], flags, mode, dir_fd=folder), "wb") as stored,
    ):
        spool.copy(file, stored)


def _enter(folder: int, name: str) -> int:
    """Return a descriptor of the subfolder `name`, which is created if missing, and close the descriptor `folder`.

    Raises:
        OSError: If a link or a file has that name, or it can't be created. In that case, `folder` stays open.
    """
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    os.close(folder)
    return inner
