"""Tar archives of folders, written and unpacked relative to a descriptor; no link is followed."""

from __future__ import annotations

import os
import stat

from .files import open_below
from .limits import MAX_DEPTH, Refused, WrongArgument

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    import tarfile
    from typing import IO

TIME = "mtime"


def pack(folder: int, stream: IO[bytes], name: str = "") -> None:
    """Write the folder's content, or one entry of it, as a tar archive.

    The archive contains files, folders, links and hard links, with modes and times. Pipes, sockets and devices are left
    out.
    """
    import tarfile  # Imported only by a process that needs it, because it takes long.

    linked: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for each in [name] if name else sorted(os.listdir(folder)):
            pack_entry(archive, folder, each, "", linked, 0)


def pack_entry(
    archive: tarfile.TarFile, folder: int, name: str, prefix: str, linked: dict[tuple[int, int], str], depth: int
) -> None:
    """Write a file, link or whole folder; `linked` contains the first name of each file with several names."""
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    entry = entry_of(archive, prefix + name, info)
    if stat.S_ISLNK(info.st_mode):
        entry.type, entry.linkname = b"2", os.readlink(name, dir_fd=folder)
        archive.addfile(entry)
    elif stat.S_ISREG(info.st_mode) and (info.st_dev, info.st_ino) in linked:
        entry.type, entry.linkname = b"1", linked[info.st_dev, info.st_ino]
        archive.addfile(entry)
    elif stat.S_ISREG(info.st_mode):
        if info.st_nlink > 1:
            linked[info.st_dev, info.st_ino] = prefix + name
        with os.fdopen(open_whatever_mode(name, folder, info), "rb") as file:
            entry.size = os.fstat(file.fileno()).st_size
            archive.addfile(entry, file)
    elif stat.S_ISDIR(info.st_mode):
        entry.type = b"5"
        archive.addfile(entry)
        inner = open_whatever_mode(name, folder, info)
        try:
            if depth == MAX_DEPTH:
                raise Refused(f"it is over {MAX_DEPTH} folders deep")
            for each in sorted(os.listdir(inner)):
                pack_entry(archive, inner, each, f"{prefix}{name}/", linked, depth + 1)
        finally:
            os.fchmod(inner, entry.mode)
            os.close(inner)


def entry_of(archive: tarfile.TarFile, path: str, info: os.stat_result) -> tarfile.TarInfo:
    entry = archive.tarinfo(path)
    entry.mode = stat.S_IMODE(info.st_mode)
    seconds, rest = divmod(info.st_mtime_ns, 10**9)
    entry.mtime = seconds
    entry.pax_headers = {TIME: f"{seconds}.{rest:09d}"}  # A float can't represent the nanoseconds.
    return entry


def open_whatever_mode(name: str, folder: int, info: os.stat_result) -> int:
    """Return a descriptor of our own file or folder, whatever its mode; the caller must restore a folder's mode."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | (os.O_DIRECTORY if stat.S_ISDIR(info.st_mode) else os.O_NONBLOCK)
    mode = stat.S_IMODE(info.st_mode)
    needed = stat.S_IRUSR | (stat.S_IXUSR if stat.S_ISDIR(info.st_mode) else 0)
    if mode & needed == needed:
        return os.open(name, flags, dir_fd=folder)
    os.chmod(name, mode | stat.S_IRWXU, dir_fd=folder)
    fd = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISDIR(info.st_mode):
        os.fchmod(fd, mode)
    return fd


def unpack(work: str, top: list[str], stream: IO[bytes]) -> None:
    """Create an archive's content, compressed or not, below the folder `top`, replacing files of the same names.

    No link is followed, and no name may lead out of the folder.

    Raises:
        Refused: If it is not an archive, or contains anything but files, folders and links.
    """
    import tarfile

    os.close(open_below(work, top, make=True))
    folders: dict[tuple[str, ...], tuple[int, int]] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|*", encoding="utf-8") as archive:
            for entry in archive:
                parts = [*top, *parts_below(entry.name)]
                if entry.isdir():
                    os.close(open_below(work, parts, make=True))
                    folders[tuple(parts)] = (entry.mode & 0o7777, time_of(entry))
                else:
                    unpack_entry(archive, work, top, parts, entry)
                archive.members.clear()  # type: ignore[attr-defined]  # Otherwise it would keep every name.
    except (OSError, Refused, MemoryError, RecursionError):
        raise
    except Exception as error:  # Each compression has its own errors.
        raise WrongArgument(f"not a tar archive, or an incomplete one: {error}") from None
    folders.pop(tuple(top), None)
    for inner, (mode, time) in sorted(folders.items(), key=by_depth):  # A mode may make its folder inaccessible.
        fd = open_below(work, [*inner])
        os.fchmod(fd, mode)
        os.utime(fd, ns=(time, time))
        os.close(fd)


def by_depth(folder: tuple[tuple[str, ...], object]) -> int:
    """Return a sort key that puts inner folders first."""
    return -len(folder[0])


def unpack_entry(archive: tarfile.TarFile, work: str, top: list[str], parts: list[str], entry: tarfile.TarInfo) -> None:
    if not (entry.issym() or entry.islnk() or entry.isreg()) or parts == top:
        raise WrongArgument(f"{entry.name!r} in the archive is not a file, folder or link")
    folder = open_below(work, parts[:-1], make=True)
    name, time = parts[-1], time_of(entry)
    try:
        make_way(name, folder)
        if entry.issym():
            os.symlink(entry.linkname, name, dir_fd=folder)
            os.utime(name, ns=(time, time), dir_fd=folder, follow_symlinks=False)
        elif entry.islnk():
            first = [*top, *parts_below(entry.linkname)]
            source = open_below(work, first[:-1])
            try:
                os.link(first[-1], name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
            finally:
                os.close(source)
        else:
            unpack_file(archive, folder, name, entry, time)
    finally:
        os.close(folder)


def make_way(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def unpack_file(archive: tarfile.TarFile, folder: int, name: str, entry: tarfile.TarInfo, time: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    content = archive.extractfile(entry)
    assert content is not None
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        while data := content.read(1 << 20):
            file.write(data)
        file.flush()
        if os.fstat(file.fileno()).st_size != entry.size:
            raise WrongArgument(f"{entry.name!r} in the archive is truncated")
        os.fchmod(file.fileno(), entry.mode & 0o7777)
        os.utime(file.fileno(), ns=(time, time))


def parts_below(path: str) -> list[str]:
    """Return the names in an archive's path.

    Raises:
        Refused: If the path leads out of the folder, or is too deep.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or len(parts) > MAX_DEPTH + 1:
        raise WrongArgument(f"{path!r} in the archive is outside the folder, or over {MAX_DEPTH} folders deep")
    return parts


def time_of(entry: tarfile.TarInfo) -> int:
    """Return the modification time in nanoseconds."""
    seconds, _, rest = str(entry.pax_headers.get(TIME, int(entry.mtime))).partition(".")
    try:
        return int(seconds) * 10**9 + int(f"{rest:0<9.9}")
    except ValueError:
        raise WrongArgument(f"{entry.name!r} has an invalid time") from None
