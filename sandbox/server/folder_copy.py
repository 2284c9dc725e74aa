"""The copy of a working folder, at any depth and with any mode, following no link."""

from __future__ import annotations

import errno
import os
import stat

from .limits import PROC, Refused

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def open_whatever_its_mode(path: str) -> int:
    """Return a descriptor of one of our folders, whatever its mode, and leave the mode unchanged."""
    handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        os.chmod(f"self/fd/{handle}", mode | stat.S_IRWXU, dir_fd=PROC)
        fd = os.open(".", DIRECTORY, dir_fd=handle)
        os.fchmod(fd, mode)
        return fd
    finally:
        os.close(handle)


def copy_folder(source: int, target: int, max_depth: int | None = None) -> None:
    """Copy files, folders and links, with modes and times; pipes, sockets and devices are left out.

    Only two folders are open at a time, however deep they are. Both descriptors are closed at the end.
    """
    folders: list[tuple[int, tuple[int, int], list[str]]] = []
    left = copy_files(source, target)
    while True:
        if left:
            name = left.pop()
            if max_depth is not None and len(folders) >= max_depth:
                raise Refused(f"it is over {max_depth} folders deep")
            info = os.stat(name, dir_fd=source, follow_symlinks=False)
            mode = stat.S_IMODE(info.st_mode)
            make_readable(name, source, mode)
            os.mkdir(name, 0o700, dir_fd=target)
            source, target = step(source, name), step(target, name)
            folders.append((mode, (info.st_atime_ns, info.st_mtime_ns), left))
            left = copy_files(source, target)
        elif folders:
            mode, times, left = folders.pop()
            os.utime(target, ns=times)
            source, target = leave(source, mode), leave(target, mode)
        else:
            os.close(source)
            os.close(target)
            return


def step(folder: int, name: str) -> int:
    """Replace the folder's descriptor with one of its subfolder of that name."""
    try:
        return os.open(name, DIRECTORY, dir_fd=folder)
    finally:
        os.close(folder)


def leave(folder: int, mode: int) -> int:
    """Replace the folder's descriptor with one of its parent; the folder gets its final mode."""
    above = os.open("..", DIRECTORY, dir_fd=folder)
    os.fchmod(folder, mode)
    os.close(folder)
    return above


def make_readable(name: str, folder: int, mode: int) -> None:
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(name, mode | stat.S_IRWXU, dir_fd=folder)


def copy_files(source: int, target: int) -> list[str]:
    """Copy everything except folders, and return the names of the folders."""
    folders: list[str] = []
    for name in os.listdir(source):
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISDIR(info.st_mode):
            folders.append(name)
        elif stat.S_ISREG(info.st_mode):
            copy_file(source, target, name, info)
    return folders


def copy_file(source: int, target: int, name: str, info: os.stat_result) -> None:
    """Copy one file, whatever its mode is; holes stay holes."""
    mode = stat.S_IMODE(info.st_mode)
    if not mode & stat.S_IRUSR:
        os.chmod(name, mode | stat.S_IRWXU, dir_fd=source)
    old = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
    new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=target)
    try:
        copy_content(old, new, info.st_size)
        for fd in (old, new):
            os.fchmod(fd, mode)
        os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
    finally:
        os.close(old)
        os.close(new)


def copy_content(old: int, new: int, size: int) -> None:
    os.ftruncate(new, size)
    at = 0
    while at < size:
        try:
            at, end = next_data(old, at, size)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # Only a hole is left, or the file was shortened meanwhile.
        os.lseek(new, at, os.SEEK_SET)
        while at < end:
            count = os.sendfile(new, old, at, min(end - at, 1 << 24))
            if not count:
                return
            at += count


def next_data(fd: int, at: int, size: int) -> tuple[int, int]:
    """Return the start and end of the next data.

    A kernel without support for holes (gVisor's) reports everything as data.

    Raises:
        OSError: With ENXIO if there is no more data.
    """
    try:
        begin = os.lseek(fd, at, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return at, size
