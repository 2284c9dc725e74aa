"""A sandbox and its branches, and the protocols of the specs and pools that sandboxes come from."""

import builtins
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

from agentgym.sandboxes.protocol.arguments import (
    MAX_OUTPUT,
    Program,
    check_cell,
    check_command,
    check_data,
    check_files,
    check_limit,
    check_path,
    check_path_here,
    check_progress,
    check_text,
    check_timeout,
)
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.protocol.lifetime import Lifetime
from agentgym.sandboxes.protocol.network import LocalAddress, NetworkRequest, SandboxService
from agentgym.sandboxes.protocol.programs import OUTPUT_LIMIT, ExecResult, SandboxProcess, SandboxShell, Verdict

FILE_LIMIT = 64 << 20
"""Bytes that `get` and `archive` take out of a sandbox, where the call does not say how many."""
HostFunction: TypeAlias = Callable[..., object | Awaitable[object]]
"""A function of the host that code in the sandbox may call: it takes and returns plain JSON."""
Expected: TypeAlias = object | Callable[[Any], bool]
"""The right value of a hidden case, or a function of the host that says whether a value is right."""
Progress: TypeAlias = Callable[[int], object]
"""Called with the number of bytes that were copied so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """What `Sandbox.verify` runs."""

    code: str | None
    command: str | Sequence[str] | None
    files: Mapping[str, str | bytes] | None
    expect: Mapping[str, Expected] | None


class Sandbox(ABC):
    """One leased sandbox: files, a shell and a stateful Python, all under limits.

    A program that fails is a result; a sandbox that died raises SandboxError. What is in the sandbox and is not what a
    call asks for raises SandboxContentError, of the kinds that each call names. Relative paths start at the sandbox's
    working folder, which is also the folder programs start in.

    Each call checks its arguments, and that the sandbox may still be used, before the sandbox is asked: `exec` calls
    `_exec` with what it was given. A kind of sandbox implements the methods that are abstract here.
    """

    lifetime: Lifetime
    """The time in which calls can be made: a lease, or the life of a branch."""

    def _begin(self, timeout_s: float) -> None:
        """Begin a call: ClosedError after the lease, ValueError for what is not a time limit."""
        self.lifetime.check()
        check_timeout(timeout_s)

    @property
    @abstractmethod
    def digest(self) -> str:
        """The image digest that the sandbox was made from, or the kind of the sandbox."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 10.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a shell command, or a program and its arguments, in a process of its own; it ends with the call.

        It starts in `cwd`, with `env` beside the sandbox's own environment, and reads `stdin`, which is empty without
        it. Of each stream the first and the last bytes are kept, `output_limit` (2 to 16 MiB) in all. The exit code is
        126 if a command cannot start, and 127 if there is none.
        """
        self._begin(timeout_s)
        check_command(command)
        check_limit("output_limit", output_limit, 2, MAX_OUTPUT)
        return await self._exec(Program(command, cwd, env, stdin), timeout_s, output_limit)

    @abstractmethod
    async def _exec(self, program: Program, timeout_s: float, output_limit: int) -> ExecResult: ...

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> AbstractAsyncContextManager[SandboxProcess]:
        """Start a program that goes on beside other calls: `async with sandbox.start("./serve") as process`.

        It ends with the block, and all that it started with it; `timeout_s` is for its start and its end. ValueError
        if 64 programs and shells run in the sandbox.
        """
        self._begin(timeout_s)
        check_command(command)
        return self._start(Program(command, cwd, env), timeout_s)

    @abstractmethod
    def _start(self, program: Program, timeout_s: float) -> AbstractAsyncContextManager[SandboxProcess]: ...

    def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 30.0
    ) -> AbstractAsyncContextManager[SandboxShell]:
        """Open a shell whose folder, variables and functions stay from run to run: `async with sandbox.shell() as
        shell`.

        It ends with the block, and all that it started with it; `timeout_s` is for its start and its end. ValueError
        if 64 programs and shells run in the sandbox.
        """
        self._begin(timeout_s)
        return self._shell(Program(None, cwd, env), timeout_s)

    @abstractmethod
    def _shell(self, program: Program, timeout_s: float) -> AbstractAsyncContextManager[SandboxShell]: ...

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run Python as a REPL cell: names persist from call to call, a last expression is printed by repr.

        `functions` are callable from the code by name and run on the host, in this event loop: the way to
        give code access to a secret or a counter without putting it into the sandbox. `fresh` runs in a new
        namespace and process that the earlier code never touched, for verifiers; the session goes on after it.

        At most 1000 calls of `functions` are answered in one cell. An async function is awaited while the
        sandbox waits; a plain one runs in the event loop and holds it up. An error of theirs is raised in the
        code as RuntimeError; errors of infrastructure (`SandboxError`, `EngineError`) end the call here.
        """
        self._begin(timeout_s)
        check_cell(code, functions or {}, fresh)
        check_limit("output_limit", output_limit, 2, MAX_OUTPUT)
        return await self._python(code, timeout_s, dict(functions or {}), fresh=fresh, output_limit=output_limit)

    @abstractmethod
    async def _python(
        self, code: str, timeout_s: float, functions: Mapping[str, HostFunction], *, fresh: bool, output_limit: int
    ) -> ExecResult: ...

    async def verify(
        self,
        *,
        code: str | None = None,
        command: str | Sequence[str] | None = None,
        files: Mapping[str, str | bytes] | None = None,
        expect: Mapping[str, Expected] | None = None,
        timeout_s: float = 10.0,
    ) -> Verdict:
        """Run hidden tests over a copy of the working folder, in processes that the episode never touched.

        `code` is Python: each function whose name begins with `test` is a case, in a process of its own. With
        `expect` the cases are expressions instead, and their values are compared on the host, which alone knows the
        right ones. `command` is a command that runs tests, or its words: plain commands of Python (a file,
        `-m unittest`, `-m pytest`) count as passed where the tests came to their end; of any other one the exit code
        counts. With `expect` it runs once for each text, given on stdin, and its output is compared on the host.
        `files` are hidden files, by path, laid anew for each case. They take the place of what could stand in for
        them; in `code` and plain commands of Python, tests find no module, fixture or configuration of the episode's
        beside them, and no library finds a module of its own there. The cases share the copy, and `timeout_s`: each
        may take half of what is left of it, and the last one all of that. Nothing is left in the sandbox.
        Whatever the code does, there is a verdict with a reason for each case that has not passed. What ends early,
        by `os._exit(0)` for instance, has failed.
        ValueError names the argument that makes no sense, before the sandbox is asked.
        """
        self._begin(timeout_s)
        return await self._verify(HiddenTests(code=code, command=command, files=files, expect=expect), timeout_s)

    @abstractmethod
    async def _verify(self, tests: HiddenTests, timeout_s: float) -> Verdict: ...

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = 30.0) -> None:
        """Write whole files of any size by path, making folders; no link is followed.

        SandboxContentError, which is also a ValueError, for a path that is a link, a folder, or leads out of the
        working
        folder, and if the sandbox cannot write it, such as for a full disk: then also an OSError with the kernel's
        number.
        """
        self._begin(timeout_s)
        check_files("files", files)
        contents = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        await self._write(contents, timeout_s)

    @abstractmethod
    async def _write(self, files: Mapping[str, bytes], timeout_s: float) -> None: ...

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> bytes:
        """Return the file's bytes; SandboxContentError if there is none or it is over `limit` bytes.

        Also for a link, a folder, a pipe, a device, a path that leads out, and a file that cannot be read. A missing
        file is also a FileNotFoundError, any other one a ValueError; what the kernel says has its number (OSError).
        """
        self._begin(timeout_s)
        check_path(path)
        check_limit("limit", limit)
        return await self._read(path, limit, timeout_s)

    @abstractmethod
    async def _read(self, path: str, limit: int, timeout_s: float) -> bytes: ...

    async def read_text(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> str:
        """Return the file's text; SandboxContentError as of `read`, and if it is not UTF-8."""
        data = await self.read(path, limit=limit, timeout_s=timeout_s)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise WrongContent(f"{path!r} is not UTF-8: {error}") from None

    async def list(self, path: str = ".", *, timeout_s: float = 30.0) -> builtins.list[str]:
        """Return the sorted names in a folder, those of folders with a trailing slash.

        A name that is not UTF-8 has its other bytes as `os.fsdecode` says them, and every call takes it as it is.
        SandboxContentError if there is no such folder, for what is none and for a path that leads out.
        """
        self._begin(timeout_s)
        check_path(path)
        return [*await self._list(path, timeout_s)]

    @abstractmethod
    async def _list(self, path: str, timeout_s: float) -> Sequence[str]: ...

    async def put(
        self,
        source: str | Path,
        target: str = ".",
        *,
        timeout_s: float = 30.0,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file of this machine to `target`, or what is in a folder into the folder `target`, of any size.

        ValueError for a link, a pipe, a device, and over 10,000 files; nothing is written then.
        """
        self._begin(timeout_s)
        check_path_here("source", source)
        check_text("target", target)
        check_progress(progress)
        await self._put(Path(source), target, timeout_s, progress)

    @abstractmethod
    async def _put(self, source: Path, target: str, timeout_s: float, progress: Progress | None) -> None: ...

    async def get(
        self,
        source: str,
        target: str | Path,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = 30.0,
        progress: Progress | None = None,
    ) -> Sequence[str]:
        """Copy a file of the sandbox to `target`, or what is in a folder into the folder `target`.

        An empty folder makes an empty folder: look at what `target` is. Links, pipes and devices are left out; their
        names are the answer. SandboxContentError if there is nothing, over `limit` bytes in all, over 10,000 files and
        folders and over 100 folders deep; nothing is written then. FileExistsError if a link of this machine is in
        the way.
        """
        self._begin(timeout_s)
        check_text("source", source)
        check_path_here("target", target)
        check_limit("limit", limit)
        check_progress(progress)
        return await self._get(source, Path(target), limit, timeout_s, progress)

    @abstractmethod
    async def _get(
        self, source: str, target: Path, limit: int, timeout_s: float, progress: Progress | None
    ) -> Sequence[str]: ...

    async def archive(
        self,
        path: str = ".",
        target: str | Path | None = None,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = 30.0,
    ) -> bytes:
        """Return a file, or what is in a folder, as a tar archive; with `target` it is written there and b"" returned.

        Modes and times are exact, links are in it as links; pipes, sockets and devices are left out.
        SandboxContentError if there is nothing, and over `limit` bytes of archive.
        """
        self._begin(timeout_s)
        check_path(path)
        if target is not None:
            check_path_here("target", target)
        check_limit("limit", limit)
        return await self._archive(path, None if target is None else Path(target), limit, timeout_s)

    @abstractmethod
    async def _archive(self, path: str, target: Path | None, limit: int, timeout_s: float) -> bytes: ...

    async def unpack(self, archive: bytes | str | Path, path: str = ".", *, timeout_s: float = 30.0) -> None:
        """Make the files, folders and links of a tar archive, compressed or not, below the folder `path`.

        They have the archive's modes and times, and take the place of files of their names.
        The archive is its bytes, or a file of this machine. ValueError for what is none, and for a name that leads out;
        what came before that name is made.
        """
        self._begin(timeout_s)
        check_path(path)
        if not isinstance(archive, Path):
            check_data("archive", archive)
        await self._unpack(Path(archive) if isinstance(archive, str) else archive, path, timeout_s)

    @abstractmethod
    async def _unpack(self, archive: bytes | Path, path: str, timeout_s: float) -> None: ...

    @abstractmethod
    async def fork(self, *, timeout_s: float = 30.0) -> "Branch":
        """Return a branch that goes on from here, with the same names in memory and a copy of the working folder.

        From now on neither meets what the other does. A branch ends when it is closed, and with its sandbox's episode.
        Of a process with several threads only the main one goes on in the branch. The copied folder stands at
        another path, which is the branch's current folder: use relative paths. ValueError if the folder or the session
        cannot be copied.
        """

    @abstractmethod
    def requests(self) -> Sequence[NetworkRequest]:
        """Return every request of this episode to the sandbox's proxy, in order; empty where `network` is no
        allow-list."""

    @abstractmethod
    def port(self, port: int, *, timeout_s: float = 10.0) -> AbstractAsyncContextManager[LocalAddress]:
        """Lend an address of this machine that leads to 127.0.0.1:port in the sandbox, once something listens there.

        At most 32 connections at once, more wait. TimeoutError if nothing listens in time, ValueError if the sandbox
        has no network of its own.
        """

    @abstractmethod
    def service(self, name: str) -> SandboxService:
        """Return the container of that name beside the sandbox; ValueError where there is none."""

    async def snapshot(self, path: str | Path, *, limit: int = 1 << 30, timeout_s: float = 120.0) -> None:
        """Write the working folder to a tar file on this machine: exact modes, times, links and sizes.

        Everything else in the sandbox is stopped meanwhile; pipes and sockets are left out. ValueError over `limit`
        bytes, over `timeout_s`, and if the folder is over 100 folders deep; no file is written then.
        """
        self._begin(timeout_s)
        check_path_here("path", path)
        check_limit("limit", limit)
        await self._snapshot(Path(path), limit, timeout_s)

    @abstractmethod
    async def _snapshot(self, path: Path, limit: int, timeout_s: float) -> None: ...

    async def restore(self, path: str | Path, *, timeout_s: float = 120.0) -> None:
        """Replace the working folder's content by that of a snapshot, which may come from another sandbox.

        ValueError for a file that is no snapshot, or is cut off; the folder stays as it is then. What is in it is
        unpacked inside the sandbox, which follows no link: ValueError for what leads out of the folder, does not fit or
        takes over `timeout_s`; the folder is empty then, or as empty as 5 s can make it.
        """
        self._begin(timeout_s)
        check_path_here("path", path)
        await self._restore(Path(path), timeout_s)

    @abstractmethod
    async def _restore(self, path: Path, timeout_s: float) -> None: ...

    @abstractmethod
    async def reset(self, *, timeout_s: float = 10.0) -> None:
        """Bring the sandbox back to the state of a new one: no process, file, name or branch is left."""


class Branch(Sandbox, ABC):
    """A forked sandbox: `async with await sandbox.fork() as branch`."""

    @abstractmethod
    async def close(self) -> None:
        """End the branch, its processes and its files; closing twice is harmless."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SandboxPool(Protocol):
    """An open pool of sandboxes."""

    def lease(self) -> AbstractAsyncContextManager[Sandbox]:
        """Lease a clean sandbox for one rollout: wait for a free one, and take it back at the end, also on
        cancellation."""
        ...


class SandboxSpec(Protocol):
    """The sandboxes that an environment needs, as it declares them."""

    def open(self, size: int) -> AbstractAsyncContextManager[SandboxPool]:
        """Open a pool that leases at most `size` sandboxes at once and leaves nothing behind when it closes."""
        ...
