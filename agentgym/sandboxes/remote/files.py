"""Calls that move files: whole ones in one frame, large ones and archives piece by piece."""

import asyncio
import builtins
import errno
import io
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from agentgym.errors import BoxContentError, SandboxError, WireError
from agentgym.machine.finished import finished
from agentgym.sandboxes.host_files import (
    MAX_DEPTH,
    MAX_FILES,
    HostFile,
    HostSource,
    Spool,
    batches,
    find_files,
    is_name,
    load,
    new_file,
    open_file,
    store_tree,
)
from agentgym.sandboxes.protocol import FILE_LIMIT, Progress
from agentgym.sandboxes.protocol.arguments import (
    check_data,
    check_files,
    check_limit,
    check_path_here,
    check_progress,
    check_text,
    check_timeout,
)
from agentgym.sandboxes.protocol.content import LateContent, NotAFile, TextFiles, UnusablePath, WrongContent, in_time
from agentgym.sandboxes.remote.calls import check_path, deadline_in, left_until
from agentgym.sandboxes.remote.host_functions import MAX_FILE
from agentgym.sandboxes.remote.process import RemoteProcess
from agentgym.sandboxes.remote.programs import Programs
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST, raise_refusal
from agentgym.sandboxes.remote.writes import MAX_BATCH, about, write_batches

FILES_S = 30.0
PIECE = 4 << 20
"""Bytes of a large file in one frame."""
MAX_AT_ONCE = 1 << 20
"""The most bytes that are written to this machine's disk in the event loop."""


class Files(Programs, TextFiles):
    """The files of a session's working folder."""

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = FILES_S) -> None:
        """Write whole files of any size by path; see `boxes.Box.write`."""
        check_files("files", files)
        self.lifetime.check()
        deadline = deadline_in(timeout_s)
        small: dict[str, bytes] = {}
        for path in files:
            check_path(path)
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            if len(data) <= MAX_FILE:
                small[path] = data
            else:
                await self._send_pieces(path, _pieces_of(data), deadline, executable=False)
        await self._write(small, (), deadline)

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = FILES_S) -> bytes:
        """Return the file's bytes; see `boxes.Box.read`."""
        check_text("path", path)
        check_limit("limit", limit)
        deadline = deadline_in(timeout_s)
        pieces: list[bytes] = []

        async def take(piece: bytes) -> None:
            pieces.append(piece)

        await self._receive_file(path, limit, deadline, take)
        return b"".join(pieces)

    async def list(self, path: str = ".", *, timeout_s: float = FILES_S) -> list[str]:
        """Return the sorted names in a folder; see `boxes.Box.list`."""
        check_text("path", path)
        return [*await self._names(path, timeout_s)]

    async def put(
        self,
        source: str | Path,
        target: str = ".",
        *,
        timeout_s: float = FILES_S,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file or a folder of this machine; see `boxes.Box.put`.

        ValueError for a link, a pipe, a device, and over 10,000 files; nothing is written then.
        """
        check_path_here("source", source)
        check_text("target", target)
        check_progress(progress)
        self.lifetime.check()
        deadline = deadline_in(timeout_s)
        done = 0
        found = await asyncio.to_thread(find_files, Path(source), target)
        for file in found:
            check_path(file.path)
        for batch in batches(found, MAX_BATCH, PIECE):
            if batch[0].size > PIECE:
                await self._send_file(batch[0], deadline)
            else:
                contents = await asyncio.to_thread(load, batch)
                await self._write(contents, {file.path for file in batch if file.executable}, deadline)
            done += sum(file.size for file in batch)
            if progress is not None:
                progress(done)

    async def get(
        self,
        source: str,
        target: str | Path,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = FILES_S,
        progress: Progress | None = None,
    ) -> Sequence[str]:
        """Copy a file or a folder of the box; see `boxes.Box.get`.

        ValueError over 10,000 files too, FileExistsError where a link of this machine is in the way.
        """
        check_text("source", source)
        check_path_here("target", target)
        check_limit("limit", limit)
        check_progress(progress)
        deadline = deadline_in(timeout_s)
        with Spool(Path(target)) as spool:
            left_out = await self._collect(source, limit, deadline, spool, progress)
            await finished(asyncio.ensure_future(asyncio.to_thread(store_tree, Path(target), spool)))
        return left_out

    async def _collect(
        self, source: str, limit: int, deadline: float, spool: Spool, progress: Progress | None
    ) -> builtins.list[str]:
        """Bring a file, or all files of a folder, into the spool; return what was left out."""
        left_out: list[str] = []
        folders = [""]
        while folders:
            below = folders.pop()
            try:
                names = await self._names(f"{source}/{below}" if below else source, left_until(deadline))
            except UnusablePath as error:
                if below or error.errno != errno.ENOTDIR:
                    raise
                await self._fetch(source, "", limit, deadline, spool, progress)
                return []
            spool.folders.append(below.removesuffix("/"))
            for name in names:
                path = f"{below}{name}"
                if len(spool.files) + len(spool.folders) + len(folders) > MAX_FILES:
                    raise WrongContent(f"{source!r} holds over {MAX_FILES} files and folders")
                if name.endswith("/"):
                    if path.count("/") > MAX_DEPTH:
                        raise WrongContent(f"{source!r} is over {MAX_DEPTH} folders deep")
                    folders.append(path)
                    continue
                try:
                    await self._fetch(f"{source}/{path}", path, limit - spool.size, deadline, spool, progress)
                except NotAFile:
                    left_out.append(path)
        return left_out

    async def _fetch(
        self, path: str, name: str, limit: int, deadline: float, spool: Spool, progress: Progress | None
    ) -> None:
        start = spool.size

        async def take(piece: bytes) -> None:
            await asyncio.to_thread(spool.write, piece) if len(piece) > MAX_AT_ONCE else spool.write(piece)
            if progress is not None:
                progress(spool.size)

        executable = await self._receive_file(path, limit, deadline, take)
        spool.files.append(HostFile(name, start, spool.size - start, executable))

    async def archive(
        self,
        path: str = ".",
        target: str | Path | None = None,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = FILES_S,
    ) -> bytes:
        """Return a tar archive of a file or a folder, or write it to `target`; see `boxes.Box.archive`."""
        check_timeout(timeout_s)
        check_path(path)
        check_limit("limit", limit)
        if target is not None:
            check_path_here("target", target)
            with new_file(Path(target)) as out:
                await self._receive_archive(path, out, limit, timeout_s)
            return b""
        kept = io.BytesIO()
        await self._receive_archive(path, kept, limit, timeout_s)
        return kept.getvalue()

    async def _receive_archive(self, path: str, out: BinaryIO, limit: int, timeout_s: float) -> None:
        async with (
            in_time(timeout_s, "the archive"),
            self._process(b"", timeout_s, {"task": "archive", "path": path}) as task,
        ):
            size = 0
            async for piece in task.stdout:
                size += len(piece)
                if size > limit:
                    raise WrongContent(
                        f"{path!r}: the archive has over {limit} bytes, which is the limit; pass a larger limit="
                    )
                out.write(piece)
            await _check_task(task, path)

    async def unpack(self, archive: bytes | str | Path, path: str = ".", *, timeout_s: float = FILES_S) -> None:
        """Make what is in a tar archive below the folder `path`; see `boxes.Box.unpack`."""
        check_timeout(timeout_s)
        check_path(path)
        if not isinstance(archive, Path):
            check_data("archive", archive)
        with open_file(Path(archive), "archive") if isinstance(archive, (str, Path)) else io.BytesIO(archive) as given:
            task_fields = {"task": "unpack", "path": path}
            async with in_time(timeout_s, "the archive"), self._process(b"", timeout_s, task_fields) as task:
                try:
                    while piece := given.read(PIECE):
                        await task.write(piece)
                except BrokenPipeError:
                    pass  # It has had enough, and says why.
                await task.close_stdin()
                await _check_task(task, path)

    async def _receive_file(
        self, path: str, limit: int, deadline: float, take: Callable[[bytes], Awaitable[object]]
    ) -> bool:
        """Hand a file's pieces to `take`; return whether it may be executed."""
        check_path(path)
        with self._transfer() as number:
            frame = await self._call(
                "read", b"", left_until(deadline), path=path, limit=min(limit, 1 << 62), transfer=number
            )
            executable = frame.envelope.get("executable") is True
            got = len(frame.body)
            await take(frame.body)
            while frame.envelope.get("more") is True:
                frame = await self._call("read_on", b"", left_until(deadline), transfer=number)
                got += len(frame.body)
                if got > limit or (frame.envelope.get("more") is True and not frame.body):
                    self._make_no_sense(f"{got} bytes of a file, {len(frame.body)} of them now")
                await take(frame.body)
        return executable

    async def _send_file(self, file: HostSource, deadline: float) -> None:
        with open_file(file.source, "source") as content:

            async def pieces() -> AsyncIterator[bytes]:
                while piece := await asyncio.to_thread(content.read, PIECE):
                    yield piece

            await self._send_pieces(file.path, pieces(), deadline, executable=file.executable)

    async def _send_pieces(self, path: str, pieces: AsyncIterator[bytes], deadline: float, *, executable: bool) -> None:
        """Write a large file: it appears under its name when all of it is there."""
        fields: dict[str, Any] = {"path": path, "executable": executable}
        with self._transfer() as number, about(path):
            async for piece in pieces:
                await self._call("write_on", piece, left_until(deadline), transfer=number, **fields)
                fields = {}
            await self._call("write_on", b"", left_until(deadline), transfer=number, last=True, **fields)

    @contextmanager
    def _transfer(self) -> Iterator[int]:
        """Number a transfer, and have the box forget it where it is broken off here, and not refused there."""
        number = self.link.new_number()
        try:
            yield number
        except BaseException as error:
            if isinstance(error, LateContent) or not isinstance(error, BoxContentError | ValueError):
                self.link.end_later("end_transfer", transfer=number)
            raise

    async def _write(self, files: Mapping[str, bytes], executable: Container[str], deadline: float) -> None:
        for names, body in write_batches(files, executable):
            with about(*(path for path, _, _ in names)):
                await self._call("write", body, left_until(deadline), files=names)

    async def _names(self, path: str, timeout_s: float) -> Sequence[str]:
        """Read a folder's names, those of folders with a slash behind them; names that are not text keep their bytes.

        A box that answers anything else, such as a path, is cut: its names become paths of this machine.
        """
        check_path(path)
        body = (await self._call("list", b"", timeout_s, path=path)).body
        names = [os.fsdecode(name) for name in body.split(b"\0")] if body else []
        for name in names:
            if not is_name(name.removesuffix("/")):
                self._make_no_sense(f"{name!r} is not a name")
        return names

    def _make_no_sense(self, what: str) -> NoReturn:
        self.link.cut("it was closed")
        raise SandboxError(f"{SANDBOX_LOST}: the box gave an answer that makes no sense: {what}")


async def _check_task(task: RemoteProcess, path: str) -> None:
    """Wait for the end of a task; raise what it says of its failure."""
    said = b"".join([piece async for piece in task.stderr])
    code = await task.wait()
    if not code:
        return
    try:
        envelope = json.loads(said)
    except (ValueError, RecursionError):
        envelope = {}
    with suppress(SandboxError, WireError):  # Code in the box may have written it: it is no fault of the machine.
        raise_refusal(envelope if isinstance(envelope, dict) else {}, {"path": path})
    raise UnusablePath(errno.EINTR, f"the task was ended from inside the box, with {code}", path)


async def _pieces_of(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]
