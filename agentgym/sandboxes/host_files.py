"""Files of this machine on their way into a box and out of it: bounded, and no link is followed."""

import os
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MAX_FILES = 10_000
MAX_TREE = 64 << 20
MAX_BATCH = 200


class HostFile(NamedTuple):
    """A file and its path: below the target folder, or "" for the target itself."""

    path: str
    content: bytes
    executable: bool


def load_tree(source: Path, target: str, max_file: int) -> list[HostFile]:
    """Return the file, or each file in the folder, by its path below `target`; ValueError for links and over limits."""
    found: list[HostFile] = []
    room = MAX_TREE
    for path in _files(source):
        if len(found) == MAX_FILES:
            raise ValueError(f"{str(source)!r} holds over {MAX_FILES} files")
        content, executable = _load(path, min(room, max_file))
        room -= len(content)
        below = path.relative_to(source)
        inside = PurePosixPath(target, below) if below.parts else PurePosixPath(_file_target(source, target))
        found.append(HostFile(str(inside), content, executable))
    return found


def _file_target(source: Path, target: str) -> str:
    """The target of a single file: the given path, or its own name in the working folder."""
    return source.name if target in ("", ".") else target


def _files(path: Path) -> Iterator[Path]:
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        for inner in sorted(path.iterdir()):
            yield from _files(inner)
    elif stat.S_ISREG(mode):
        yield path
    else:
        raise ValueError(f"{str(path)!r} is a link, a pipe or a device")


def _load(path: Path, limit: int) -> tuple[bytes, bool]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(limit + 1)
        mode = os.fstat(file.fileno()).st_mode
    if len(content) > limit:
        raise ValueError(f"{str(path)!r}: over the limit of {limit} bytes")
    return content, bool(mode & stat.S_IXUSR)


def store_tree(target: Path, files: Sequence[HostFile]) -> None:
    """Write the files below `target`, and nowhere else; nothing is written where one of the paths leads out of it.

    FileExistsError where a link is in the way, ValueError for a path that is not names between slashes.
    """
    # A target without a name of its own, such as "." or "..", is a folder that the caller means as it stands.
    top, first = (target.parent, [target.name]) if is_name(target.name) else (target, [])
    paths = [[*first, *_names(file.path, target)] for file in files]
    if not all(paths):
        raise ValueError(f"{str(target)!r} is a folder, and a file's content was to be written there")
    for parts, file in zip(paths, files, strict=True):
        top.mkdir(parents=True, exist_ok=True)
        _store(top, parts, file)


def is_name(name: str) -> bool:
    """Whether a name is one component of a path and leads to something in its folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _names(path: str, target: Path) -> list[str]:
    """The components of a file's path; none for "", which is the target itself."""
    names = path.split("/") if path else []
    if not all(map(is_name, names)):
        raise ValueError(f"{path!r} leads out of {str(target)!r}, or is no path")
    return names


def _store(top: Path, parts: Sequence[str], file: HostFile) -> None:
    folder = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            folder = _enter(folder, part)
        mode = 0o755 if file.executable else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(parts[-1], flags, mode, dir_fd=folder)
        except OSError as error:
            raise FileExistsError(f"a link or a folder is in the way of {file.path!r}") from error
        with os.fdopen(fd, "wb") as stored:
            stored.write(file.content)
    finally:
        os.close(folder)


def _enter(folder: int, name: str) -> int:
    """Open a sub-folder in place of its folder; it is made where there is none."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        raise FileExistsError(f"a link or a file is in the way of the folder {name!r}") from error
    os.close(folder)
    return inner


def batches(
    files: Mapping[str, str | bytes], executable: Container[str], max_bytes: int
) -> Iterator[tuple[list[tuple[str, int, bool]], bytes]]:
    """Yield the files in groups of at most `max_bytes` and 200 files, one for each frame."""
    names: list[tuple[str, int, bool]] = []
    parts: list[bytes] = []
    size = 0
    for path, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        if len(data) > max_bytes:
            raise ValueError(f"{path!r}: {len(data)} bytes, the limit is {max_bytes}")
        if names and (size + len(data) > max_bytes or len(names) == MAX_BATCH):
            yield names, b"".join(parts)
            names, parts, size = [], [], 0
        names.append((path, len(data), path in executable))
        parts.append(data)
        size += len(data)
    if names:
        yield names, b"".join(parts)
