"""File calls below a working folder: no link is followed, and no path leads out of it."""

from __future__ import annotations

import errno
import os
import stat

from .frames import check_time
from .limits import IPC_RMID, MAX_IPC, MAX_PATH, PROC, NotAFile, Refused, libc

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def words_of_error(error: BaseException) -> str:
    """Return an error's text: the kernel's message without its number, or else the error's own."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def parts_of(path: str, work: str) -> list[str]:
    """Return the names that lead from the working folder to `path`.

    Raises:
        Refused: If the path leads out of the working folder, or can't exist.
    """
    if len(path.encode("utf-8", "surrogatepass")) > MAX_PATH:
        raise Refused(f"{path[:50]!r}... is over {MAX_PATH} bytes long")
    if path.startswith("/"):
        if path != work and not path.startswith(work.rstrip("/") + "/"):
            raise Refused(f"{path!r} is outside the working folder {work}")
        path = path[len(work) :]
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise Refused(f"{path!r} is outside the working folder {work}")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise Refused(f"{path!r} is not a valid path: it contains a lone surrogate") from None
    return parts


def stand(work: str) -> None:
    """Recreate an empty working folder if the code has removed it or put something else in its place."""
    try:
        mode = os.lstat(work).st_mode
    except FileNotFoundError:
        mode = 0
    except PermissionError:
        os.chmod(os.path.dirname(work), 0o1777)  # The code has locked the folder of the branches.
        return stand(work)
    if stat.S_ISDIR(mode):
        return
    if mode:
        above = os.open(os.path.dirname(work), os.O_PATH | os.O_DIRECTORY)
        remove_file(os.path.basename(work), above)
        os.close(above)
    os.mkdir(work)


def open_below(work: str, parts: list[str], *, make: bool = False) -> int:
    """Return a descriptor of the folder, following no links; if `make`, missing folders are created."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    fd = os.open(work, flags)
    for part in parts:
        if make:
            try:
                os.mkdir(part, 0o755, dir_fd=fd)
            except FileExistsError:
                pass
        try:
            inner = os.open(part, flags, dir_fd=fd)
            # gVisor's kernel follows a link here anyway, so check that the opened folder is the one with that name.
            if not os.path.samestat(os.fstat(inner), os.stat(part, dir_fd=fd, follow_symlinks=False)):
                os.close(inner)
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        finally:
            os.close(fd)
        fd = inner
    return fd


def open_file(work: str, path: str) -> int:
    """Return a descriptor for reading a regular file.

    Raises:
        Refused: If the path is a folder, link, pipe or device.
    """
    parts = parts_of(path, work)
    if not parts:
        raise Refused(f"{path!r} is a folder")
    folder = open_below(work, parts[:-1])
    try:
        mode = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):  # Checked before it is opened, which fails for some devices and all sockets.
            raise NotAFile(f"{path!r} is {'a link' if stat.S_ISLNK(mode) else 'not a file'}")
        # O_NONBLOCK: a pipe that takes its place must not block the supervisor.
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFile(f"{path!r} is not a file")
    return fd


def check_file(name: str, folder: int, path: str) -> None:
    """Check that a file of this name can be written: either it is a writable file, or nothing has that name.

    Raises:
        NotAFile: If it is a link, pipe, socket or device.
        IsADirectoryError: If it is a folder.
        PermissionError: If it is read-only.
    """
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise NotAFile(f"{path!r} is a link")
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise NotAFile(f"{path!r} is not a file")
    if not mode & stat.S_IWUSR:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def remove_quietly(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass


def forget_compiled(name: str, folder: int) -> None:
    """Remove compiled files of a module that was just written, because they would run instead of it."""
    module, dot, kind = name.rpartition(".")
    if not dot or kind not in ("py", "pyw"):
        return
    remove_quietly(f"{module}.pyc", folder)
    try:
        caches = os.open("__pycache__", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        remove_quietly("__pycache__", folder)  # Imports follow a link to a folder.
        return
    try:
        for cached in os.listdir(caches):
            if cached.startswith(f"{module}."):
                remove_quietly(cached, caches)
    finally:
        os.close(caches)


def list_folder(work: str, path: str) -> list[bytes]:
    fd = open_below(work, parts_of(path, work))
    try:
        with os.scandir(fd) as entries:
            return sorted(
                os.fsencode(entry.name) + (b"/" if entry.is_dir(follow_symlinks=False) else b"") for entry in entries
            )
    finally:
        os.close(fd)


def remove_folder(path: str, deadline: float) -> None:
    empty_folder(path, deadline)
    os.rmdir(path)


def open_to_empty(name: str, folder: int) -> int:
    """Return a descriptor of a subfolder that can be emptied, whatever its mode was; no link is followed."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        os.chmod(f"self/fd/{handle}", 0o700, dir_fd=PROC)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
    finally:
        os.close(handle)


def remove_file(name: str, folder: int) -> bool:
    """Remove a file, and return whether it was one; a folder stays."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def empty_folder(path: str, deadline: float) -> None:
    """Remove everything below `path`, at any depth and with any mode; no link is followed.

    The folders in each subfolder are moved to the top before the subfolder is removed, so no path ever grows long.
    Their new names start with random digits, so code in the sandbox can't have put anything in their way.

    Raises:
        TimeoutError: At the deadline.
    """
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    unique, lifted = os.urandom(16).hex(), 0
    try:
        while names := os.listdir(top):
            for name in names:
                check_time(deadline)  # Code in the sandbox chose how much there is to remove.
                if remove_file(name, top):
                    continue
                folder = open_to_empty(name, top)
                try:
                    for inner in os.listdir(folder):
                        check_time(deadline)
                        if not remove_file(inner, folder):
                            os.close(open_to_empty(inner, folder))
                            lifted += 1
                            os.rename(inner, f"{unique}-{lifted}", src_dir_fd=folder, dst_dir_fd=top)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def empty_ipc() -> None:
    """Remove the System V objects of our namespace."""
    kinds: dict[str, tuple[Callable[[], int], Callable[[int], object]]] = {
        "shm": (lambda: libc.shmget(0, 1, 0o600), lambda number: libc.shmctl(number, IPC_RMID, None)),
        "msg": (lambda: libc.msgget(0, 0o600), lambda number: libc.msgctl(number, IPC_RMID, None)),
        "sem": (lambda: libc.semget(0, 1, 0o600), lambda number: libc.semctl(number, 0, IPC_RMID)),
    }
    for kind, (make, remove) in kinds.items():
        for number in ipc_numbers(kind, make):
            remove(number)


IPC_SEEN: dict[str, int] = {}
"""The highest removed number of each kind of object, for a kernel that lists none."""


def ipc_numbers(kind: str, make: Callable[[], int]) -> Iterable[int]:
    """Return the numbers of all System V objects of a kind.

    gVisor's kernel lists none, but counts up, so all numbers up to that of a new object are returned.
    """
    try:
        with open(f"/proc/sysvipc/{kind}", "rb") as file:
            return [int(row.split()[1]) for row in file.read().splitlines()[1:]]
    except OSError:
        first = IPC_SEEN.get(kind, 0)
        newest = make()
        IPC_SEEN[kind] = newest if newest >= 0 else first + MAX_IPC
        return range(first, IPC_SEEN[kind] + 1)
