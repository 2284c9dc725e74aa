"""Folders as tar archives, made and unpacked in a process of their own; no link is followed."""

from __future__ import annotations

import json
import os
import stat

from .files import open_below, open_file, parts_of
from .limits import MAX_DEPTH, Refused

TYPE_CHECKING = False  # Importing typing would cost each new box some milliseconds.
if TYPE_CHECKING:
    import tarfile
    from typing import Any, NoReturn


def run_task(name: str, work: str, path: str) -> NoReturn:
    """Be the process of a task: from standard input or to standard output; exit with 1 and the reason as JSON."""
    try:
        {"archive": archive, "unpack": unpack}[name](work, path)
    except (Refused, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(error.strerror or str(error), error.errno)
    except BaseException as error:
        fail(f"{type(error).__name__}: {error}")
    os._exit(0)


def fail(text: str, number: int | None = None) -> NoReturn:
    said = {"error": text[:4000], **({} if number is None else {"errno": number})}
    os.write(2, json.dumps(said).encode())
    os._exit(1)


def archive(work: str, path: str) -> None:
    """Write the file, or what is in the folder, as a tar archive; pipes, sockets and devices are left out."""
    import tarfile

    parts = parts_of(path, work)
    with open(1, "wb", closefd=False) as out, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        try:
            folder = open_below(work, parts)
        except NotADirectoryError:
            os.close(open_file(work, path, os.O_RDONLY))  # The same refusals as of a single file.
            add(tar, open_below(work, parts[:-1]), parts[-1], parts[-1], 0)
        else:
            add_all(tar, folder, "", 0)


def add_all(tar: tarfile.TarFile, folder: int, above: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Refused(f"{above!r} is over {MAX_DEPTH} folders deep")
    for name in sorted(os.listdir(folder)):
        add(tar, folder, name, above + name, depth)
    os.close(folder)


def add(tar: tarfile.TarFile, folder: int, name: str, path: str, depth: int) -> None:
    import tarfile

    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    member = tarfile.TarInfo(path)
    member.mode, member.mtime = stat.S_IMODE(info.st_mode), int(info.st_mtime)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        add_all(tar, os.open(name, flags | os.O_DIRECTORY, dir_fd=folder), f"{path}/", depth + 1)
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
        tar.addfile(member)
    elif stat.S_ISREG(info.st_mode):
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)


def unpack(work: str, path: str) -> None:
    """Read a tar archive, compressed or not, and make its files, folders and links below the folder."""
    import tarfile

    os.close(open_below(work, parts_of(path, work), make=True))
    with open(0, "rb", closefd=False) as given:
        try:
            with tarfile.open(fileobj=given, mode="r|*") as tar:
                for member in tar:
                    make(tar, member, work, path)
        except (tarfile.TarError, EOFError) as error:
            raise Refused(f"this is no tar archive, or not all of it: {error}") from None


def make(tar: tarfile.TarFile, member: tarfile.TarInfo, work: str, path: str) -> None:
    parts = parts_of(f"{path}/{member.name}", work)
    if member.name.startswith("/"):
        raise Refused(f"{member.name!r} in the archive is outside of the folder")
    if member.isdir():
        os.close(open_below(work, parts, make=True))
        return
    if not (member.isreg() or member.issym()) or parts == parts_of(path, work):
        raise Refused(f"{member.name!r} in the archive is no file, folder or symbolic link")
    folder = open_below(work, parts[:-1], make=True)
    try:
        make_new(tar, member, folder, parts[-1])
    finally:
        os.close(folder)


def make_new(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
    """Make a file or a link in place of a file or a link that has its name."""
    import shutil

    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=folder)
        return
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    with open(fd, "wb") as file:
        content: Any = tar.extractfile(member)
        shutil.copyfileobj(content, file, 1 << 20)
        os.fchmod(fd, 0o600 | member.mode & 0o777)
