"""Calls that move files: small files whole in one frame, large files and archives piece by piece."""

import asyncio
import errno
import io
import json
import os
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from agentgym.errors import SandboxContentError, SandboxError, WireError
from agentgym.machine.finished import finished
from agentgym.sandboxes.host_files import (
    MAX_DEPTH,
    MAX_FILES,
    HostFile,
    Spool,
    batches,
    find_files,
    is_name,
    load,
    new_file,
    open_file,
    store_tree,
)
from agentgym.sandboxes.protocol import Progress
from agentgym.sandboxes.protocol.arguments import check_path
from agentgym.sandboxes.protocol.content import LateContent, NotAFile, UnusablePath, WrongContent, in_time
from agentgym.sandboxes.remote.calls import deadline_in, left_until
from agentgym.sandboxes.remote.host_functions import MAX_FILE
from agentgym.sandboxes.remote.process import RemoteProcess
from agentgym.sandboxes.remote.programs import Programs
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST, raise_refusal
from agentgym.sandboxes.remote.writes import MAX_BATCH, about, write_batches

PIECE = 4 << 20
"""Bytes of a large file in one frame."""
MAX_AT_ONCE = 1 << 20
"""Maximum number of bytes that the event loop itself writes to this machine's disk at once."""


class Files(Programs):
    """The files of a session's working folder."""

    async def _write(self, files: Mapping[str, bytes], timeout_s: float) -> None:
        deadline = deadline_in(timeout_s)
        for path, data in files.items():
            if len(data) > MAX_FILE:
                await self._send_large(path, io.BytesIO(data), deadline, executable=False)
        await self._write_small({path: data for path, data in files.items() if len(data) <= MAX_FILE}, (), deadline)

    async def _read(self, path: str, limit: int, timeout_s: float) -> bytes:
        pieces: list[bytes] = []

        async def take(piece: bytes) -> None:
            pieces.append(piece)

        await self._receive_file(path, limit, deadline_in(timeout_s), take)
        return b"".join(pieces)

    async def _put(self, source: Path, target: str, timeout_s: float, progress: Progress | None) -> None:
        deadline = deadline_in(timeout_s)
        done = 0
        found = await asyncio.to_thread(find_files, source, target)
        for file in found:
            check_path(file.path)
        for batch in batches(found, MAX_BATCH, PIECE):
            if batch[0].size > PIECE:
                with open_file(batch[0].source, "source") as content:
                    await self._send_large(batch[0].path, content, deadline, executable=batch[0].executable)
            else:
                contents = await asyncio.to_thread(load, batch)
                await self._write_small(contents, {file.path for file in batch if file.executable}, deadline)
            done += sum(file.size for file in batch)
            if progress is not None:
                progress(done)

    async def _get(
        self, source: str, target: Path, limit: int, timeout_s: float, progress: Progress | None
    ) -> Sequence[str]:
        with Spool(target) as spool:
            left_out = await self._collect(source or ".", limit, deadline_in(timeout_s), spool, progress)
            await finished(asyncio.ensure_future(asyncio.to_thread(store_tree, target, spool)))
        return left_out

    async def _collect(
        self, source: str, limit: int, deadline: float, spool: Spool, progress: Progress | None
    ) -> list[str]:
        """Copy a file, or all files of a folder, into the spool, and return the paths that were left out."""
        left_out: list[str] = []
        folders = [""]
        while folders:
            below = folders.pop()
            try:
                names = await self._list(f"{source}/{below}" if below else source, left_until(deadline))
            except UnusablePath as error:
                if below or error.errno != errno.ENOTDIR:
                    raise
                await self._fetch(source, "", limit, deadline, spool, progress)
                return []
            spool.folders.append(below.removesuffix("/"))
            for name in names:
                path = f"{below}{name}"
                if len(spool.files) + len(spool.folders) + len(folders) > MAX_FILES:
                    raise WrongContent(f"{source!r} contains more than {MAX_FILES} files and folders")
                if name.endswith("/"):
                    if path.count("/") > MAX_DEPTH:
                        raise WrongContent(f"{source!r} is more than {MAX_DEPTH} folders deep")
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

    async def _archive(self, path: str, target: Path | None, limit: int, timeout_s: float) -> bytes:
        task_fields, size = {"task": "archive", "path": path}, 0
        with io.BytesIO() if target is None else new_file(target, "target") as out:
            async with in_time(timeout_s, "the archive"), self._process(b"", timeout_s, task_fields) as task:
                async for piece in task.stdout:
                    size += len(piece)
                    if size > limit:
                        raise WrongContent(
                            f"{path!r}: the archive exceeds the limit of {limit} bytes; pass a larger limit="
                        )
                    out.write(piece)
                await _check_task(task, path)
            return out.getvalue() if isinstance(out, io.BytesIO) else b""

    async def _unpack(self, archive: bytes | Path, path: str, timeout_s: float) -> None:
        with open_file(archive, "archive") if isinstance(archive, Path) else io.BytesIO(archive) as given:
            task_fields = {"task": "unpack", "path": path}
            async with in_time(timeout_s, "the archive"), self._process(b"", timeout_s, task_fields) as task:
                try:
                    while piece := given.read(PIECE):
                        await task.write(piece)
                except BrokenPipeError:
                    pass  # The program that unpacks accepts no more input, and reports why.
                await task.close_stdin()
                await _check_task(task, path)

    async def _receive_file(
        self, path: str, limit: int, deadline: float, take: Callable[[bytes], Awaitable[object]]
    ) -> bool:
        """Pass a file's pieces to `take`, and return whether the file is executable."""
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
                    self._make_no_sense(f"{got} bytes of a file so far, {len(frame.body)} of them in this frame")
                await take(frame.body)
        return executable

    async def _send_large(self, path: str, content: BinaryIO, deadline: float, *, executable: bool) -> None:
        """Write a large file, which appears under its name once it is complete."""
        fields: dict[str, Any] = {"path": path, "executable": executable}
        with self._transfer() as number, about(path):
            while piece := await asyncio.to_thread(content.read, PIECE):
                await self._call("write_on", piece, left_until(deadline), transfer=number, **fields)
                fields = {}
            await self._call("write_on", b"", left_until(deadline), transfer=number, last=True, **fields)

    @contextmanager
    def _transfer(self) -> Iterator[int]:
        """Yield the number of a new transfer of a file.

        If the transfer fails, the host tells the sandbox to drop what has been transferred, except if the sandbox
        itself has refused the transfer.
        """
        number = self.link.new_number()
        try:
            yield number
        except BaseException as error:
            if isinstance(error, LateContent) or not isinstance(error, SandboxContentError | ValueError):
                self.link.end_later("end_transfer", transfer=number)
            raise

    async def _write_small(self, files: Mapping[str, bytes], executable: Container[str], deadline: float) -> None:
        for names, body in write_batches(files, executable):
            with about(*(path for path, _, _ in names)):
                await self._call("write", body, left_until(deadline), files=names)

    async def _list(self, path: str, timeout_s: float) -> Sequence[str]:
        """Return the names in a folder; names of subfolders end with a slash.

        In a name that is not UTF-8, the invalid bytes are escaped as by `os.fsdecode`. The names become paths on this
        machine. So if an answer contains anything other than plain names, such as a path, the connection to the
        sandbox is closed.
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
        raise SandboxError(f"{SANDBOX_LOST}: the sandbox sent an invalid answer: {what}")


async def _check_task(task: RemoteProcess, path: str) -> None:
    """Wait until a program that packs or unpacks an archive ends; if it failed, raise the error that it reports."""
    said = b"".join([piece async for piece in task.stderr])
    code = await task.wait()
    if not code:
        return
    try:
        envelope = json.loads(said)
    except (ValueError, RecursionError):
        envelope = {}
    with suppress(SandboxError, WireError):  # Code in the sandbox may have written it, so the machine is not at fault.
        raise_refusal(envelope if isinstance(envelope, dict) else {}, {"path": path})
    raise UnusablePath(
        errno.EINTR,
        f"the process that handles the archive was ended from inside the sandbox, with exit code {code}",
        path,
    )
