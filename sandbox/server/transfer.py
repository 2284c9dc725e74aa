"""Transfers of large files to and from the host, piece by piece."""

from __future__ import annotations

import os
import stat

from .files import check_file, forget_compiled, open_below, open_file, parts_of, remove_quietly
from .frames import write_fully
from .limits import CHUNK, MAX_TRANSFERS, Refused, WrongArgument

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any


class Outgoing:
    """A file that the host reads, up to the size that it had when it was opened."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.left = fd, size

    def next(self) -> bytearray:
        data = bytearray(min(self.left, CHUNK))
        got = os.readv(self.fd, [data]) if data else 0
        del data[got:]
        self.left = self.left - got if got else 0
        return data

    def close(self) -> None:
        os.close(self.fd)


class Incoming:
    """A file that the host writes, under a name that no code can guess until it is complete.

    Once complete, it replaces the existing file, but descriptors and hard links of the old file still lead to the old
    one. Files that Python compiled from a module of that name are removed, too.
    """

    def __init__(self, work: str, path: str, *, executable: bool) -> None:
        parts = parts_of(path, work)
        if not parts:
            raise Refused(f"{path!r} is a folder")
        self.path, self.name, self.hidden = path, parts[-1], f".{os.urandom(16).hex()}"
        self.folder = open_below(work, parts[:-1], make=True)
        try:
            check_file(self.name, self.folder, path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self.fd = os.open(self.hidden, flags, 0o644, dir_fd=self.folder)
        except BaseException:
            os.close(self.folder)
            raise
        if executable:
            os.fchmod(self.fd, 0o755)

    def take(self, data: bytes | bytearray | memoryview) -> None:
        write_fully(self.fd, [data], None)

    def finish(self) -> None:
        """Give the file its final name.

        Raises:
            NotAFile: If something other than a file has that name by now.
        """
        check_file(self.name, self.folder, self.path)
        os.rename(self.hidden, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        self.hidden = ""
        forget_compiled(self.name, self.folder)

    def close(self) -> None:
        if self.hidden:
            remove_quietly(self.hidden, self.folder)  # The code may have moved or removed it.
        os.close(self.fd)
        os.close(self.folder)


def write_file(work: str, path: str, data: memoryview, *, executable: bool) -> None:
    incoming = Incoming(work, path, executable=executable)
    try:
        incoming.take(data)
        incoming.finish()
    finally:
        incoming.close()


class Transfers:
    """The transfers in progress, by the numbers that the host gave them."""

    def __init__(self) -> None:
        self.open: dict[int, Outgoing | Incoming] = {}

    def add(self, number: int, transfer: Outgoing | Incoming) -> None:
        self.open[number] = transfer
        if len(self.open) > MAX_TRANSFERS:
            self.end(number)
            raise WrongArgument(f"more than {MAX_TRANSFERS} large files are being transferred at once")

    def end(self, number: int) -> None:
        transfer = self.open.pop(number, None)
        if transfer is not None:
            transfer.close()

    def end_all(self) -> None:
        for number in [*self.open]:
            self.end(number)

    def begin_reading(self, work: str, envelope: dict[str, Any]) -> tuple[dict[str, Any], bytearray]:
        """Return the file's first piece; `more` says whether there is another one."""
        fd = open_file(work, envelope["path"])
        outgoing = Outgoing(fd, 0)
        try:
            info = os.fstat(fd)
            if info.st_size > envelope["limit"]:
                size, limit = info.st_size, envelope["limit"]
                raise Refused(f"{envelope['path']!r} has {size} bytes, but the limit is {limit}; pass a larger limit=")
            outgoing.left = info.st_size
            data = outgoing.next()
        except BaseException:
            outgoing.close()
            raise
        answer = {"executable": bool(info.st_mode & stat.S_IXUSR)}
        if not outgoing.left:
            outgoing.close()
            return answer, data
        self.add(envelope["transfer"], outgoing)
        return {**answer, "more": True}, data

    def read_on(self, number: int) -> tuple[dict[str, Any], bytearray]:
        outgoing = self.open.get(number)
        if not isinstance(outgoing, Outgoing):
            raise WrongArgument("the file is not being transferred")
        data = outgoing.next()
        if outgoing.left:
            return {"more": True}, data
        self.end(number)
        return {}, data

    def write_on(self, work: str, envelope: dict[str, Any], body: bytearray) -> None:
        """Write a piece; the first piece gives the path, and the one with `last` gives the file its name."""
        number = envelope["transfer"]
        if "path" in envelope:
            self.add(number, Incoming(work, envelope["path"], executable=envelope["executable"]))
        incoming = self.open.get(number)
        if not isinstance(incoming, Incoming):
            raise WrongArgument("the file is not being transferred")
        try:
            incoming.take(body)
            if envelope.get("last"):
                incoming.finish()
        except BaseException:
            self.end(number)
            raise
        if envelope.get("last"):
            self.end(number)
