"""Fake sandboxes, which live in the test's own process."""

import asyncio
import errno
import io
import shlex
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from agentgym.sandboxes.fake.files import (
    bytes_of,
    copied,
    is_below,
    load_tree,
    names_in,
    path_of,
    read_file,
    store,
    tar_of,
    with_files,
)
from agentgym.sandboxes.fake.programs import FakeProcess, FakeShell, blocking, run_cell
from agentgym.sandboxes.host_files import new_file, open_file, open_snapshot
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.network.sandbox_network import Networked, SandboxNetwork
from agentgym.sandboxes.protocol import (
    OUTPUT_LIMIT,
    Branch,
    ExecResult,
    HiddenTests,
    HostFunction,
    Lifetime,
    Progress,
    Sandbox,
    SandboxProcess,
    SandboxShell,
    Verdict,
)
from agentgym.sandboxes.protocol.arguments import Program
from agentgym.sandboxes.protocol.content import WrongContent, of_number

Shell: TypeAlias = Mapping[str, str | ExecResult] | Callable[[str], str | ExecResult]


class FakeSandbox(Networked, Branch):
    """A Sandbox in the test's own process: files in memory, Python run for real, shell commands answered from a table.

    It provides no isolation: only run a test's own code in it.

    Args:
        shell: The results of shell commands: a mapping keyed by the command line, or a function that takes it. A string
            is the stdout of a command that succeeds. None means that any shell command raises AssertionError.
        files: The initial files, keyed by path; `reset` restores them. None means no files.
    """

    digest = "fake"

    def __init__(self, shell: Shell | None = None, files: Mapping[str, str | bytes] | None = None) -> None:
        self.answers, self.initial = shell, dict(files or {})
        self.files: dict[str, bytes] = {}
        self.log: list[str] = []
        self.lifetime, self.network = Lifetime("the sandbox"), SandboxNetwork()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.files = with_files({}, {path_of(path): bytes_of(data) for path, data in self.initial.items()})
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    async def _exec(self, program: Program, timeout_s: float, output_limit: int) -> ExecResult:
        """Answer a command from the shell table; a list of arguments is looked up as its shell-quoted command line."""
        command = program.command or ""
        command = command if isinstance(command, str) else shlex.join(command)
        self.log.append(command)
        if self.answers is None:
            raise AssertionError(f"FakeSandbox: the env ran {command!r}; give FakeSandbox(shell=...) an answer for it")
        if not callable(self.answers) and command not in self.answers:
            raise AssertionError(
                f"FakeSandbox: no answer for {command!r}; add it to shell=, which has answers for "
                f"{sorted(self.answers)}"
            )
        answer = self.answers(command) if callable(self.answers) else self.answers[command]
        if isinstance(answer, ExecResult):
            return answer
        return ExecResult(status="ok", exit_code=0, stdout=answer, stderr="")

    async def _python(
        self, code: str, timeout_s: float, functions: Mapping[str, HostFunction], *, fresh: bool, output_limit: int
    ) -> ExecResult:
        """Run the cell for real, in a thread of this process."""
        self.log.append(code)
        namespace = {"__name__": "__main__"} if fresh else self.namespace
        loop = asyncio.get_running_loop()
        namespace |= {name: blocking(function, loop) for name, function in functions.items()}
        return await asyncio.to_thread(run_cell, code, namespace)

    async def _verify(self, tests: HiddenTests, timeout_s: float) -> Verdict:
        """Run the hidden tests for real, on copies of the files in an unsafe sandbox of this machine."""
        command = tests.command
        line = command if command is None or isinstance(command, str) else shlex.join(command)
        self.log.append("\n".join(map(str, [tests.code or line or "", *(tests.expect or ())])))
        async with Process(unsafe=True).open(1) as pool, pool.lease() as sandbox:
            await sandbox.write(self.files)
            return await sandbox._verify(tests, timeout_s)

    @asynccontextmanager
    async def _start(self, program: Program, timeout_s: float) -> AsyncIterator[SandboxProcess]:
        """Run the program in the fake shell, and yield it as a process that has already ended with that result."""
        yield FakeProcess(await self._exec(program, timeout_s, OUTPUT_LIMIT))

    @asynccontextmanager
    async def _shell(self, program: Program, timeout_s: float) -> AsyncIterator[SandboxShell]:
        """Yield a shell whose commands are answered like those of `exec`."""
        yield FakeShell(self)

    async def _write(self, files: Mapping[str, bytes], timeout_s: float) -> None:
        """Store the files.

        Raises:
            ValueError: If a path is one that real sandboxes refuse.
        """
        if "." in map(path_of, files):
            raise WrongContent("files: '.' is a folder")
        self.files = with_files(self.files, {path_of(path): data for path, data in files.items()})

    async def _read(self, path: str, limit: int, timeout_s: float) -> bytes:
        return read_file(self.files, path, limit)

    async def _list(self, path: str, timeout_s: float) -> Sequence[str]:
        return names_in(self.files, path)

    async def _put(self, source: Path, target: str, timeout_s: float, progress: Progress | None) -> None:
        loaded = load_tree(source, target)
        self.files = with_files(self.files, loaded)
        if progress is not None:
            progress(sum(map(len, loaded.values())))

    async def _get(
        self, source: str, target: Path, limit: int, timeout_s: float, progress: Progress | None
    ) -> Sequence[str]:
        inside = self._inside(source)
        size = sum(len(self.files[name]) for name in inside.values())
        if size > limit:
            raise WrongContent(f"{source} has {size} bytes, but the limit is {limit}")
        store(target, {below: self.files[name] for below, name in inside.items()})
        if progress is not None:
            progress(size)
        return []

    def _inside(self, source: str) -> dict[PurePosixPath, str]:
        """Return a file's name, or the names of all files in a folder, keyed by their paths relative to `source`."""
        folder = PurePosixPath(path_of(source))
        inside = {PurePosixPath(name).relative_to(folder): name for name in self.files if is_below(name, folder)}
        if str(folder) in self.files:
            inside[PurePosixPath()] = str(folder)
        if not inside:
            raise of_number(errno.ENOENT, source)
        return inside

    async def _archive(self, path: str, target: Path | None, limit: int, timeout_s: float) -> bytes:
        inside = sorted(self._inside(path).items())
        names = {str(below) if below.parts else PurePosixPath(name).name: name for below, name in inside}
        packed = tar_of({name: self.files[source] for name, source in names.items()}, limit)
        if target is None:
            return packed
        with new_file(target, "target") as out:
            out.write(packed)
        return b""

    async def _unpack(self, archive: bytes | Path, path: str, timeout_s: float) -> None:
        try:
            with (
                open_file(archive, "archive") if isinstance(archive, Path) else io.BytesIO(archive) as given,
                tarfile.open(fileobj=given) as tar,
            ):
                found = ((member.name, tar.extractfile(member)) for member in tar)
                packed = {path_of(str(PurePosixPath(path, name))): file.read() for name, file in found if file}
                self.files = with_files(self.files, packed)
        except tarfile.TarError as error:
            raise ValueError(f"not a tar archive, or an incomplete one: {error}") from None

    async def _snapshot(self, path: Path, limit: int, timeout_s: float) -> None:
        """Write the files to a tar file; modes and times are tarfile's defaults."""
        packed = tar_of(self.files, limit)
        with new_file(path, "path") as out:
            out.write(packed)

    async def _restore(self, path: Path, timeout_s: float) -> None:
        with open_snapshot(path) as file, tarfile.open(fileobj=file) as archive:
            contents = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
            self.files = {name: file.read() for name, file in contents.items() if file is not None}

    async def fork(self, *, timeout_s: float = 30.0) -> "FakeSandbox":
        """Create a branch with copies of the files and of all Python names; values that can't be copied are shared.

        Args:
            timeout_s: Time limit in seconds; it is only validated.

        Returns:
            A new FakeSandbox. It ends when this sandbox is reset or its lease ends.
        """
        self._begin(timeout_s)
        branch = FakeSandbox(self.answers, self.initial)
        branch.lifetime = Lifetime("the branch", self.lifetime)
        branch.files = dict(self.files)
        branch.namespace = {name: copied(value) for name, value in self.namespace.items()}
        return branch

    async def close(self) -> None:
        """End the branch; there is no process to stop."""
        self.lifetime.end("its close() was called")

    async def reset(self, *, timeout_s: float = 10.0) -> None:
        """Restore the initial files, clear the Python names and end all branches.

        Args:
            timeout_s: Time limit in seconds; it is only validated.
        """
        self._begin(timeout_s)
        self.lifetime.end_inner("the sandbox was reset")
        self._begin_anew()


class FakeSandboxPool:
    """A pool of fake sandboxes.

    `leased` lists the sandboxes in use, and `made` all sandboxes that the pool has created.

    Args:
        make: Creates the sandbox of each lease.
    """

    def __init__(self, make: Callable[[], Sandbox] = FakeSandbox) -> None:
        self.make = make
        self.leased: list[Sandbox] = []
        self.made: list[Sandbox] = []

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        sandbox = self.make()
        self.made.append(sandbox)
        self.leased.append(sandbox)
        try:
            yield sandbox
        finally:
            self.leased.remove(sandbox)
            if isinstance(sandbox, FakeSandbox):
                sandbox.lifetime.end("its lease ended")
