"""The interfaces of a sandbox, its branches, and the specs and pools that sandboxes come from."""

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
"""Default maximum bytes that `get` and `archive` copy out of a sandbox."""
HostFunction: TypeAlias = Callable[..., object | Awaitable[object]]
"""A function on the host that code in the sandbox may call; its arguments and its result are plain JSON values."""
Expected: TypeAlias = object | Callable[[Any], bool]
"""The expected value of a hidden case, or a function on the host that returns whether a value is right."""
Progress: TypeAlias = Callable[[int], object]
"""Called with the number of bytes copied so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """The arguments of `Sandbox.verify`."""

    code: str | None
    command: str | Sequence[str] | None
    files: Mapping[str, str | bytes] | None
    expect: Mapping[str, Expected] | None


class Sandbox(ABC):
    """One leased sandbox: files, a shell and a stateful Python session, all under limits.

    A program that fails returns a result; a sandbox that died raises SandboxError. If something in the sandbox doesn't
    fit the call, such as a missing file, the call raises a SandboxContentError; each method lists the cases. Relative
    paths start at the sandbox's working folder, which is also where programs start.

    Each public method first checks its arguments, and that the sandbox may still be used. Only then does it contact the
    sandbox, through an abstract method that each kind of sandbox implements: `exec`, for example, calls `_exec`.
    """

    lifetime: Lifetime
    """The period during which calls can be made: a lease, or the life of a branch."""

    def _begin(self, timeout_s: float) -> None:
        """Check that a call may be made with this time limit.

        Raises:
            ClosedError: If the lease has ended.
            ValueError: If `timeout_s` is not a time limit.
        """
        self.lifetime.check()
        check_timeout(timeout_s)

    @property
    @abstractmethod
    def digest(self) -> str:
        """Digest of the image that the sandbox was created from, or the kind of a sandbox without an image."""

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
        """Run a shell command, or a program with its arguments, in a separate process that ends with the call.

        Args:
            command: A shell command, or a list of a program and its arguments.
            timeout_s: Time limit in seconds; a program that exceeds it has the status "timeout".
            cwd: The folder that the program starts in; None for the working folder.
            env: Environment variables in addition to the sandbox's.
            stdin: The program's standard input; None for an empty one.
            output_limit: Maximum bytes to return of each output stream, from 2 bytes to 16 MiB. Of a longer stream, the
                first and last bytes are returned.

        Returns:
            The program's result. The exit code is 126 if the command cannot start, and 127 if it doesn't exist.

        Raises:
            ValueError: If an argument is invalid.
            SandboxError: If the sandbox is lost.
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
        """Start a program that runs alongside other calls: `async with sandbox.start("./serve") as process`.

        The program, and everything it started, ends with the block.

        Args:
            command: A shell command, or a list of a program and its arguments.
            cwd: The folder that the program starts in; None for the working folder.
            env: Environment variables in addition to the sandbox's.
            timeout_s: Time limit in seconds for starting the program, and for ending it.

        Raises:
            ValueError: If an argument is invalid, or if 64 programs and shells already run in the sandbox.
        """
        self._begin(timeout_s)
        check_command(command)
        return self._start(Program(command, cwd, env), timeout_s)

    @abstractmethod
    def _start(self, program: Program, timeout_s: float) -> AbstractAsyncContextManager[SandboxProcess]: ...

    def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 30.0
    ) -> AbstractAsyncContextManager[SandboxShell]:
        """Open a shell that preserves its folder, variables and functions: `async with sandbox.shell() as shell`.

        The shell, and everything it started, ends with the block.

        Args:
            cwd: The folder that the shell starts in; None for the working folder.
            env: Environment variables in addition to the sandbox's.
            timeout_s: Time limit in seconds for starting the shell, and for ending it.

        Raises:
            ValueError: If an argument is invalid, or if 64 programs and shells already run in the sandbox.
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
        """Run Python as a REPL cell: names persist between calls, and the repr of a last expression is printed.

        `functions` run on the host, in this event loop. They give code access to a secret or a counter without putting
        it into the sandbox. An async function is awaited while the sandbox waits; a plain one blocks the event loop. If
        a function raises, the code gets a RuntimeError. Infrastructure errors (`SandboxError`, `EngineError`) are not
        passed to the code: they end this call, which raises them.

        Args:
            code: The cell's Python code.
            timeout_s: Time limit in seconds.
            functions: Functions on the host that the code can call by name, at most 1000 times per cell.
            fresh: Whether to run in a new namespace and process that earlier code never touched, as a verifier needs.
                The session continues afterward.
            output_limit: Maximum bytes to return of each output stream, from 2 bytes to 16 MiB.

        Raises:
            ValueError: If an argument is invalid.
            SandboxError: If the sandbox is lost.
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
        """Run hidden tests on a copy of the working folder, in processes that the episode never touched.

        With `code` alone, each function whose name begins with `test` is a case and runs in a separate process. With
        `code` and `expect`, each case is an expression, and its value is compared on the host, so that the sandbox
        never gets the expected values.

        With `command` alone, the tests of a plain Python command (a file, `-m unittest`, `-m pytest`) pass if they run
        to their end without failing; any other command passes if its exit code is 0. With `command` and `expect`, the
        command runs once for each text in `expect`, which it gets on stdin, and its output is compared on the host.

        The cases share the copy and the time limit. Each case may take half of the remaining time, and the last one all
        of it. Nothing is left in the sandbox. Whatever the code does, each case that has not passed gets a reason. A
        case that ends early, for example by `os._exit(0)`, has failed.

        Args:
            code: Python code with test functions, or for the expressions of `expect`.
            command: A command that runs tests, as text or as a list of words.
            files: Hidden files, keyed by path, which are written anew for each case. They replace everything
                that is at their paths or could shadow them, such as a package of the same name. In `code` and plain
                Python commands, tests find no module, fixture or configuration of the episode next to them. Nor does
                a library import any of its own modules from the episode's files.
            expect: The expected value, or a function on the host that judges a value, for each expression or input.
            timeout_s: Time limit in seconds for all cases together.

        Returns:
            The verdict, with each case's name and the reason if it failed.

        Raises:
            ValueError: If an argument is invalid; the message names it. This is raised before the sandbox is contacted.
        """
        self._begin(timeout_s)
        return await self._verify(HiddenTests(code=code, command=command, files=files, expect=expect), timeout_s)

    @abstractmethod
    async def _verify(self, tests: HiddenTests, timeout_s: float) -> Verdict: ...

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = 30.0) -> None:
        """Write whole files of any size, creating missing folders; links are not followed.

        Args:
            files: The contents, keyed by path.
            timeout_s: Time limit in seconds for all files together.

        Raises:
            SandboxContentError: If a path is a link or a folder, or leads out of the working folder, or if the
                sandbox cannot write it, for example because its disk is full. The error is also a ValueError, and an
                OSError with the errno if the kernel refused the write.
        """
        self._begin(timeout_s)
        check_files("files", files)
        contents = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        await self._write(contents, timeout_s)

    @abstractmethod
    async def _write(self, files: Mapping[str, bytes], timeout_s: float) -> None: ...

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> bytes:
        """Return a file's bytes.

        Args:
            path: The file's path.
            limit: Maximum size of the file in bytes.
            timeout_s: Time limit in seconds.

        Raises:
            SandboxContentError: If the file is missing, too large or unreadable, if the path leads out of the working
                folder, or if it names a link, a folder, a pipe or a device. For a missing file, the error is also a
                FileNotFoundError, otherwise a ValueError. If the kernel refused the read, the error is also an OSError
                with the errno.
        """
        self._begin(timeout_s)
        check_path(path)
        check_limit("limit", limit)
        return await self._read(path, limit, timeout_s)

    @abstractmethod
    async def _read(self, path: str, limit: int, timeout_s: float) -> bytes: ...

    async def read_text(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> str:
        """Return a file's text.

        Args:
            path: The file's path.
            limit: Maximum size of the file in bytes.
            timeout_s: Time limit in seconds.

        Raises:
            SandboxContentError: As for `read`, and if the file is not UTF-8.
        """
        data = await self.read(path, limit=limit, timeout_s=timeout_s)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise WrongContent(f"{path!r} is not UTF-8: {error}") from None

    async def list(self, path: str = ".", *, timeout_s: float = 30.0) -> builtins.list[str]:
        """Return the sorted names in a folder; names of subfolders end with a slash.

        In a name that is not UTF-8, the invalid bytes are escaped as by `os.fsdecode`; every call accepts such a
        name.

        Args:
            path: The folder's path.
            timeout_s: Time limit in seconds.

        Raises:
            SandboxContentError: If the folder doesn't exist, is not a folder, or leads out of the working folder.
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
        """Copy a file of any size from this machine to `target`, or a folder's content into the folder `target`.

        Args:
            source: The file or folder on this machine.
            target: The path in the sandbox.
            timeout_s: Time limit in seconds for all files together.
            progress: Called with the number of bytes copied so far; None for nothing.

        Raises:
            ValueError: If the source is or contains a link, a pipe or a device, or contains over 10,000 files.
                In that case, nothing is written.
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
        """Copy a file from the sandbox to `target`, or a folder's content into the folder `target`.

        Code in the sandbox decides whether `source` is a file or a folder, which may be empty, and `target` becomes the
        same. So check afterward whether `target` is a file or a folder.

        Args:
            source: The file or folder in the sandbox.
            target: The path on this machine.
            limit: Maximum bytes of all files together.
            timeout_s: Time limit in seconds for all files together.
            progress: Called with the number of bytes copied so far; None for nothing.

        Returns:
            The paths that were left out: links, pipes and devices.

        Raises:
            SandboxContentError: If the source doesn't exist, exceeds `limit`, contains over 10,000 files and folders,
                or is over 100 folders deep. In that case, nothing is written.
            FileExistsError: If a link, a file or a folder on this machine is in the way.
            OSError: If this machine can't store the files for another reason, such as a full disk.
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
        """Return a file, or a folder's content, as a tar archive.

        Modes and times are exact, and links are stored as links; pipes, sockets and devices are left out.

        Args:
            path: The file or folder in the sandbox.
            target: A file on this machine to write the archive to; None to return the archive.
            limit: Maximum size of the archive in bytes.
            timeout_s: Time limit in seconds.

        Returns:
            The archive, or b"" if it was written to `target`.

        Raises:
            SandboxContentError: If the path doesn't exist, or the archive exceeds `limit`.
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
        """Extract the files, folders and links of a tar archive, compressed or not, into the folder `path`.

        They get the archive's modes and times, and replace existing files of the same names.

        Args:
            archive: The archive's bytes, or the path of an archive on this machine.
            path: The folder in the sandbox.
            timeout_s: Time limit in seconds.

        Raises:
            ValueError: If `archive` is not a tar archive, or a name in it leads out of the folder. In the latter case,
                the entries before that name have been extracted.
        """
        self._begin(timeout_s)
        check_path(path)
        if isinstance(archive, str | Path):
            check_path_here("archive", archive)
        else:
            check_data("archive", archive)
        await self._unpack(Path(archive) if isinstance(archive, str) else archive, path, timeout_s)

    @abstractmethod
    async def _unpack(self, archive: bytes | Path, path: str, timeout_s: float) -> None: ...

    @abstractmethod
    async def fork(self, *, timeout_s: float = 30.0) -> "Branch":
        """Return a branch that continues from here, with copies of the session's memory and of the working folder.

        From then on, neither the branch nor the original sees the other's changes. A branch ends when it is closed, or
        when its sandbox's episode ends. Of a process with several threads, only the main thread continues in the
        branch. The copied folder has a different path, which is the branch's current folder: use relative paths.

        Args:
            timeout_s: Time limit in seconds.

        Raises:
            ValueError: If the folder or the session cannot be copied.
        """

    @abstractmethod
    def requests(self) -> Sequence[NetworkRequest]:
        """Return every request of this episode to the sandbox's proxy, in order.

        Returns:
            The requests, or an empty list if `network` is not an allow-list.
        """

    @abstractmethod
    def port(self, port: int, *, timeout_s: float = 10.0) -> AbstractAsyncContextManager[LocalAddress]:
        """Open an address on this machine that leads to 127.0.0.1:port in the sandbox, once something listens there.

        The address accepts at most 32 connections at once; further ones wait.

        Args:
            port: The port in the sandbox.
            timeout_s: Maximum seconds to wait until something listens.

        Raises:
            TimeoutError: If nothing listens in time.
            ValueError: If the sandbox has no separate network.
        """

    @abstractmethod
    def service(self, name: str) -> SandboxService:
        """Return the service container of that name next to the sandbox.

        Args:
            name: The service's name in the sandbox's settings.

        Raises:
            ValueError: If there is no such service.
        """

    async def snapshot(self, path: str | Path, *, limit: int = 1 << 30, timeout_s: float = 120.0) -> None:
        """Write the working folder to a tar file on this machine, with exact modes, times, links and sizes.

        Everything else in the sandbox is paused meanwhile. Pipes and sockets are left out.

        Args:
            path: The file on this machine.
            limit: Maximum size of the file in bytes.
            timeout_s: Time limit in seconds.

        Raises:
            ValueError: If the snapshot exceeds `limit` or `timeout_s`, or the folder is over 100 folders deep. In
                that case, no file is written.
        """
        self._begin(timeout_s)
        check_path_here("path", path)
        check_limit("limit", limit)
        await self._snapshot(Path(path), limit, timeout_s)

    @abstractmethod
    async def _snapshot(self, path: Path, limit: int, timeout_s: float) -> None: ...

    async def restore(self, path: str | Path, *, timeout_s: float = 120.0) -> None:
        """Replace the working folder's content with that of a snapshot, which may come from another sandbox.

        The snapshot is unpacked inside the sandbox, and no links are followed.

        Args:
            path: The snapshot's file on this machine.
            timeout_s: Time limit in seconds.

        Raises:
            ValueError: If the file is not a snapshot or is truncated; the folder is then unchanged. Also if an entry
                leads out of the folder, if the content doesn't fit, or if the call takes over `timeout_s`; the folder
                is then emptied, as far as that is possible within 5 s.
        """
        self._begin(timeout_s)
        check_path_here("path", path)
        await self._restore(Path(path), timeout_s)

    @abstractmethod
    async def _restore(self, path: Path, timeout_s: float) -> None: ...

    @abstractmethod
    async def reset(self, *, timeout_s: float = 10.0) -> None:
        """Return the sandbox to the state of a new one: no process, file, name or branch is left.

        Args:
            timeout_s: Time limit in seconds.
        """


class Branch(Sandbox, ABC):
    """A forked sandbox: `async with await sandbox.fork() as branch`."""

    @abstractmethod
    async def close(self) -> None:
        """End the branch, including its processes and files; closing it twice is harmless."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SandboxPool(Protocol):
    """An open pool of sandboxes."""

    def lease(self) -> AbstractAsyncContextManager[Sandbox]:
        """Lease a clean sandbox for one rollout, waiting for a free one if necessary.

        The pool takes the sandbox back at the end of the `async with` block, even if the asyncio task is cancelled.
        """
        ...


class SandboxSpec(Protocol):
    """A kind of sandbox and its settings, which an environment declares as `sandbox_spec`."""

    def open(self, size: int) -> AbstractAsyncContextManager[SandboxPool]:
        """Open a pool, which leaves nothing behind when it closes.

        Args:
            size: Maximum number of sandboxes leased at once.
        """
        ...
