"""A box over a wire, with the same calls for every kind of box."""

import asyncio
import errno
import keyword
import os
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import get_args

from agentgym.boxes import ExecResult, HostFunction, Status
from agentgym.errors import BoxKilledError, SandboxError, WireError
from agentgym.sandboxes.faults import finished
from agentgym.sandboxes.host_files import MAX_FILES, MAX_TREE, HostFile, is_name, load_tree, store_tree
from agentgym.sandboxes.link import MAX_FILE, SANDBOX_LOST, TRUNK, Link, NotAFile, WhyItEnded, tell_of_place
from agentgym.sandboxes.wire import Frame, Wire

PROTOCOL = 1
MARGIN_S = 3.0
"""Seconds beyond a call's own limit after which the host gives the box up."""
FILES_S = 30.0
RESET_S = 10.0
START_S = 30.0
MAX_CODE = 1 << 20
MAX_BATCH = 200
STATUSES = frozenset(get_args(Status)) - {"box_killed"}
"""What a box can say of a program; that the box itself was ended is for the host to say."""
KILLED = ExecResult(status="box_killed", exit_code=-9, stdout="", stderr="", state_lost=True)


class RemoteBox:
    """One session of a box at the other end of a wire; implements `types.Box`, and `types.Branch` where it is forked.

    A box makes one call at a time, its branches' calls included: others wait for their turn.
    """

    def __init__(self, link: Link, *, digest: str, end: Callable[[], Awaitable[None]], session: int = TRUNK) -> None:
        self.link = link
        self._digest = digest
        self._end = end
        self._session = session

    @classmethod
    async def open(
        cls,
        wire: Wire,
        *,
        digest: str,
        end: Callable[[], Awaitable[None]],
        why_it_ended: WhyItEnded | None = None,
    ) -> "RemoteBox":
        """Wait for the server's first frame; SandboxError where it is not the expected one."""
        try:
            frame = await wire.receive(asyncio.get_running_loop().time() + START_S)
        except (WireError, TimeoutError) as error:
            raise SandboxError(f"the box did not start: {error}") from error
        if frame.envelope.get("hello") != PROTOCOL:
            raise SandboxError(f"the box speaks another protocol than {PROTOCOL}; build its image again")
        tell_of_place(frame.envelope, digest)
        return cls(Link(wire, why_it_ended), digest=f"{digest}+python{frame.envelope.get('python')}", end=end)

    @property
    def digest(self) -> str:
        """The image's digest, or the kind of the box and the version of its Python."""
        return self._digest

    async def exec(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run a shell command in a process of its own; nothing it starts outlives the call."""
        body = _text(command, "command")
        try:
            return _result(await self._program("exec", body, timeout_s, {}), self)
        except BoxKilledError:
            return KILLED

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
    ) -> ExecResult:
        """Run Python as a REPL cell; see `types.Box.python`.

        At most 1000 calls of `functions` are answered in one cell. An async function is awaited while the
        box waits; a plain one runs in the event loop and holds it up. An error of theirs is raised in the
        code as RuntimeError; errors of infrastructure (`SandboxError`, `EngineError`) end the call here.
        """
        functions = dict(functions or {})
        for name in functions:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"functions: {name!r} is not a name")
        body = _text(code, "code")
        try:
            frame = await self._program("python", body, timeout_s, functions, functions=sorted(functions), fresh=fresh)
        except BoxKilledError:
            return KILLED
        return _result(frame, self)

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = FILES_S) -> None:
        """Write whole files of at most 16 MiB by path, making folders; no link is followed.

        ValueError for a path that leads out of the working folder; OSError where the box cannot, such as a full disk.
        """
        await self._write(files, (), timeout_s)

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = FILES_S) -> bytes:
        """Return the file's bytes; FileNotFoundError where there is none, ValueError where it is over `limit` bytes.

        Also ValueError for a link, a pipe, a path that leads out, and a `limit` over 16 MiB.
        """
        if not 0 <= limit <= MAX_FILE:
            raise ValueError(f"limit: {limit} is not within 0..{MAX_FILE}")
        return (await self._call("read", b"", timeout_s, path=path, limit=limit)).body

    async def list(self, path: str = ".", *, timeout_s: float = FILES_S) -> list[str]:
        """Return the sorted names in a folder, those of folders with a trailing slash."""
        return [os.fsencode(name).decode("utf-8", "replace") for name in await self._names(path, timeout_s)]

    async def put(self, source: str | Path, target: str = ".", *, timeout_s: float = FILES_S) -> None:
        """Copy a file of this machine to `target`, or what is in a folder into the folder `target`.

        ValueError for a link, over 16 MiB in one file, 64 MiB or 10,000 files in all; nothing is written then.
        """
        deadline = _deadline(timeout_s)
        files = await asyncio.to_thread(load_tree, Path(source), target, MAX_FILE)
        contents = {file.path: file.content for file in files}
        await self._write(contents, {file.path for file in files if file.executable}, _left(deadline))

    async def get(
        self, source: str, target: str | Path, *, limit: int = MAX_TREE, timeout_s: float = FILES_S
    ) -> Sequence[str]:
        """Copy a file of the box to `target`, or a folder's content into the folder `target`; return what was left out.

        Links, pipes and devices are left out, and named. ValueError over `limit` bytes, 16 MiB in one file or
        10,000 files, FileExistsError where a link of this machine is in the way.
        """
        deadline = _deadline(timeout_s)
        files: list[HostFile] = []
        left_out: list[str] = []
        folders = [""]
        while folders:
            below = folders.pop()
            try:
                names = await self._names(f"{source}/{below}", _left(deadline))
            except NotADirectoryError:
                if below:
                    raise
                files = [await self._fetch(source, "", limit, deadline)]
                break
            for name in names:
                path = f"{below}{name}"
                if name.endswith("/"):
                    folders.append(path)
                    continue
                if len(files) + len(folders) >= MAX_FILES:
                    raise ValueError(f"{source!r} holds over {MAX_FILES} files")
                try:
                    files.append(await self._fetch(f"{source}/{path}", path, limit, deadline))
                except (NotAFile, OSError) as error:
                    if isinstance(error, OSError) and error.errno != errno.ENXIO:  # A socket cannot be opened.
                        raise
                    left_out.append(path)
                else:
                    limit -= len(files[-1].content)
        await finished(asyncio.ensure_future(asyncio.to_thread(store_tree, Path(target), files)))
        return left_out

    async def fork(self, *, timeout_s: float = FILES_S) -> "RemoteBox":
        """Return a branch that goes on from here, with the same names in memory and a copy of the working folder.

        Of a process with several threads only the main one goes on in the branch. The copied folder stands at
        another path, which is the branch's current folder: use relative paths. Close it, or use `async with`.
        ValueError where the folder or the session cannot be copied.
        """
        branch = self.link.new_session()
        try:
            await self._call("fork", b"", timeout_s, branch=branch)
        except asyncio.CancelledError:
            self.link.end_later(branch)
            raise

        async def end() -> None:
            with suppress(SandboxError):  # It ended with its box.
                await finished(asyncio.ensure_future(self.link.call("end", b"", RESET_S, branch=branch)))

        return RemoteBox(self.link, digest=self._digest, end=end, session=branch)

    async def reset(self, *, timeout_s: float = RESET_S) -> None:
        """Bring the box back to the state of a new one; SandboxError, and a broken box, where something is left.

        It ends every branch; a branch itself cannot be reset.
        """
        if self._session != TRUNK:
            raise ValueError("a branch cannot be reset, only closed")
        try:
            frame = await self.link.call("reset", b"", timeout_s)
        except (OSError, ValueError) as error:
            self.link.cut(f"it could not be reset: {error}")
            raise SandboxError(f"{SANDBOX_LOST}: {self.broken}") from error
        if frame.envelope.get("clean") is not True:
            why = frame.envelope.get("why")
            self.link.cut(f"something of the last episode could not be removed{f': {why}' if why else ''}")
            raise SandboxError(f"{SANDBOX_LOST}: {self.broken}")

    @property
    def broken(self) -> str | None:
        """The reason why no call can be answered any more; None while the box works."""
        return self.link.broken

    def cut(self) -> None:
        """Cut the wire at once, without waiting; the box then ends by itself."""
        self.link.cut("it was closed")

    async def close(self) -> None:
        """End the box and everything in it, or this branch alone; closing twice is harmless."""
        if self._session == TRUNK:
            self.cut()
        await self._end()

    async def __aenter__(self) -> "RemoteBox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _write(self, files: Mapping[str, str | bytes], executable: Container[str], timeout_s: float) -> None:
        deadline = _deadline(timeout_s)
        for names, body in _batches(files, executable):
            await self._call("write", body, _left(deadline), files=names)

    async def _names(self, path: str, timeout_s: float) -> Sequence[str]:
        """Read a folder's names, those of folders with a slash behind them; names that are not text keep their bytes.

        A box that answers anything else, such as a path, is cut: its names become paths of this machine.
        """
        body = (await self._call("list", b"", timeout_s, path=path)).body
        names = [os.fsdecode(name) for name in body.split(b"\0")] if body else []
        for name in names:
            if not is_name(name.removesuffix("/")):
                self.cut()
                raise SandboxError(
                    f"{SANDBOX_LOST}: the box gave an answer that makes no sense: {name!r} is not a name"
                )
        return names

    async def _fetch(self, path: str, name: str, limit: int, deadline: float) -> HostFile:
        frame = await self._call("read", b"", _left(deadline), path=path, limit=min(limit, MAX_FILE))
        return HostFile(name, frame.body, frame.envelope.get("executable") is True)

    async def _program(
        self, op: str, body: bytes, timeout_s: float, serve: Mapping[str, HostFunction], **fields: object
    ) -> Frame:
        _check(timeout_s)
        return await self._call(op, body, timeout_s, serve, **fields)

    async def _call(
        self, op: str, body: bytes, timeout_s: float, serve: Mapping[str, HostFunction] | None = None, **fields: object
    ) -> Frame:
        if self._session != TRUNK:
            fields["session"] = self._session
        return await self.link.call(op, body, timeout_s + MARGIN_S, serve, timeout_s=timeout_s, **fields)


def _text(text: str, field: str) -> bytes:
    body = text.encode("utf-8", "surrogatepass")
    if len(body) > MAX_CODE:
        raise ValueError(f"{field}: {len(body)} bytes, the limit is {MAX_CODE}")
    return body


def _batches(
    files: Mapping[str, str | bytes], executable: Container[str] = ()
) -> Iterator[tuple[list[tuple[str, int, bool]], bytes]]:
    """Yield the files in groups of at most 16 MiB and 200 files, one for each frame."""
    names: list[tuple[str, int, bool]] = []
    parts: list[bytes] = []
    size = 0
    for path, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        if len(data) > MAX_FILE:
            raise ValueError(f"{path!r}: {len(data)} bytes, the limit is {MAX_FILE}")
        if names and (size + len(data) > MAX_FILE or len(names) == MAX_BATCH):
            yield names, b"".join(parts)
            names, parts, size = [], [], 0
        names.append((path, len(data), path in executable))
        parts.append(data)
        size += len(data)
    if names:
        yield names, b"".join(parts)


def _check(timeout_s: float) -> None:
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s: {timeout_s} is not a positive number of seconds")


def _deadline(timeout_s: float) -> float:
    _check(timeout_s)
    return asyncio.get_running_loop().time() + timeout_s


def _left(deadline: float) -> float:
    left = deadline - asyncio.get_running_loop().time()
    if left <= 0:
        raise TimeoutError("the files could not all be copied in time")
    return left


def _result(frame: Frame, box: RemoteBox) -> ExecResult:
    """Return the result in an answer; types and sizes are checked."""
    try:
        result = _parse(frame)
    except (KeyError, TypeError, WireError) as error:
        box.cut()
        raise SandboxError(f"{SANDBOX_LOST}: the box gave an answer that makes no sense: {error!r}") from error
    box.link.needs_replacement |= result.status in ("oom", "protocol")
    return result


def _parse(frame: Frame) -> ExecResult:
    said = frame.envelope
    out, err = said["stdout"], said["stderr"]
    checks = {
        "status": said["status"] in STATUSES,
        "exit_code": type(said["exit_code"]) is int,
        "sizes": type(out) is int and type(err) is int and out >= 0 and err >= 0 and out + err == len(frame.body),
        "flags": type(said["truncated"]) is bool and type(said["state_lost"]) is bool,
        "seconds": isinstance(said["seconds"], (int, float)),
    }
    wrong = [name for name, right in checks.items() if not right]
    if wrong:
        raise WireError(f"wrong {', '.join(wrong)}")
    return ExecResult(
        status=said["status"],
        exit_code=said["exit_code"],
        stdout=frame.body[:out].decode("utf-8", "replace"),
        stderr=frame.body[out:].decode("utf-8", "replace"),
        truncated=said["truncated"],
        state_lost=said["state_lost"],
        seconds=float(said["seconds"]),
    )
