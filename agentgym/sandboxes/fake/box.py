"""Fake boxes: boxes inside the process of a test."""

import asyncio
import errno
import io
import shlex
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeAlias

from agentgym.sandboxes.fake.files import (
    bytes_of,
    copied,
    is_below,
    load_archive,
    load_tree,
    names_in,
    path_of,
    read_file,
    store,
    tar_of,
)
from agentgym.sandboxes.fake.programs import FakeProcess, FakeShell, blocking, run_cell
from agentgym.sandboxes.host_files import open_snapshot
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.protocol import (
    FILE_LIMIT,
    OUTPUT_LIMIT,
    Box,
    BoxProcess,
    BoxService,
    BoxShell,
    ExecResult,
    Expected,
    HostFunction,
    Lifetime,
    LocalAddress,
    NetworkRequest,
    Progress,
    Verdict,
)
from agentgym.sandboxes.protocol.arguments import (
    MAX_OUTPUT,
    check_cell,
    check_data,
    check_files,
    check_limit,
    check_path_here,
    check_program,
    check_progress,
    check_timeout,
)
from agentgym.sandboxes.protocol.content import TextFiles, WrongContent, of_number

Shell: TypeAlias = Mapping[str, str | ExecResult] | Callable[[str], str | ExecResult]


class FakeBox(TextFiles):
    """A Box inside the test's own process: files in memory, Python run for real, shell commands by table.

    It is no sandbox: only a test's own code may run in it.
    """

    digest = "fake"

    def __init__(self, shell: Shell | None = None, files: Mapping[str, str | bytes] | None = None) -> None:
        self.answers, self.initial = shell, dict(files or {})
        self.files: dict[str, bytes] = {}
        self.log: list[str] = []
        self.lifetime = Lifetime("the box")
        """The time in which calls can be made: a lease, or the life of a branch."""
        self._start()

    def _start(self) -> None:
        self.files = {path_of(path): bytes_of(data) for path, data in self.initial.items()}
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    def _begin(self, timeout_s: float, progress: Progress | None = None) -> None:
        """Begin a call: ClosedError after the lease, ValueError for what is no time limit or no function."""
        self.lifetime.check()
        check_timeout(timeout_s)
        check_progress(progress)

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
        """Answer from the shell; a program and its arguments are looked up as the command line that means them."""
        self._begin(timeout_s)
        check_program(command, cwd, env, stdin)
        check_limit("output_limit", output_limit, 2, MAX_OUTPUT)
        command = command if isinstance(command, str) else shlex.join(command)
        self.log.append(command)
        if self.answers is None:
            raise AssertionError(f"FakeBox: the env ran {command!r}; give FakeBox(shell=...) an answer for it")
        if not callable(self.answers) and command not in self.answers:
            raise AssertionError(
                f"FakeBox: no answer for {command!r}; add it to the shell, which knows {sorted(self.answers)}"
            )
        answer = self.answers(command) if callable(self.answers) else self.answers[command]
        return answer if isinstance(answer, ExecResult) else _ok(answer)

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run the cell for real, in a thread of this process."""
        self._begin(timeout_s)
        check_cell(code, functions or {}, fresh)
        check_limit("output_limit", output_limit, 2, MAX_OUTPUT)
        self.log.append(code)
        namespace = {"__name__": "__main__"} if fresh else self.namespace
        loop = asyncio.get_running_loop()
        namespace |= {name: blocking(function, loop) for name, function in (functions or {}).items()}
        return await asyncio.to_thread(run_cell, code, namespace)

    async def verify(
        self,
        *,
        code: str | None = None,
        command: str | Sequence[str] | None = None,
        files: Mapping[str, str | bytes] | None = None,
        expect: Mapping[str, Expected] | None = None,
        timeout_s: float = 10.0,
    ) -> Verdict:
        """Run the hidden tests for real, over copies of the files in an unsafe box of this machine."""
        self._begin(timeout_s)
        line = command if command is None or isinstance(command, str) else shlex.join(command)
        self.log.append("\n".join(map(str, [code or line or "", *(expect or ())])))
        async with Process(unsafe=True).open(1) as pool, pool.lease() as box:
            await box.write(self.files)
            return await box.verify(code=code, command=command, files=files, expect=expect, timeout_s=timeout_s)

    @asynccontextmanager
    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> AsyncIterator[BoxProcess]:
        """Yield a program that has ended already, with the shell's answer."""
        self._begin(timeout_s)
        yield FakeProcess(await self.exec(command))

    @asynccontextmanager
    async def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 30.0
    ) -> AsyncIterator[BoxShell]:
        """Yield a shell whose commands are answered as those of `exec`."""
        self._begin(timeout_s)
        yield FakeShell(self)

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = 30.0) -> None:
        """Keep the files; ValueError for paths that real boxes refuse."""
        self._begin(timeout_s)
        check_files("files", files)
        if "." in map(path_of, files):
            raise WrongContent("files: '.' is a folder")
        self.files |= {path_of(path): bytes_of(data) for path, data in files.items()}

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> bytes:
        """Return the file's bytes; BoxContentError where there is none, and where it is over `limit` bytes."""
        self._begin(timeout_s)
        check_limit("limit", limit)
        return read_file(self.files, path, limit)

    async def list(self, path: str = ".", *, timeout_s: float = 30.0) -> list[str]:
        """Return the sorted names in a folder; BoxContentError where nothing is in it."""
        self._begin(timeout_s)
        return names_in(self.files, path)

    async def put(
        self, source: str | Path, target: str = ".", *, timeout_s: float = 30.0, progress: Progress | None = None
    ) -> None:
        """Copy a file or a folder of this machine into the files."""
        self._begin(timeout_s, progress)
        check_path_here("source", source)
        loaded = load_tree(Path(source), target)
        self.files |= loaded
        if progress is not None:
            progress(sum(map(len, loaded.values())))

    async def get(
        self,
        source: str,
        target: str | Path,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = 30.0,
        progress: Progress | None = None,
    ) -> Sequence[str]:
        """Copy files to this machine; ValueError over `limit` bytes in all."""
        self._begin(timeout_s, progress)
        check_path_here("target", target)
        check_limit("limit", limit)
        inside = self._inside(source)
        size = sum(len(self.files[name]) for name in inside.values())
        if size > limit:
            raise WrongContent(f"{source}: {size} bytes, the limit is {limit}")
        store({Path(target, below): self.files[name] for below, name in inside.items()})
        if progress is not None:
            progress(size)
        return []

    def _inside(self, source: str) -> dict[PurePosixPath, str]:
        """The names of a file, or of those in a folder, by the paths below it."""
        folder = PurePosixPath(path_of(source))
        inside = {PurePosixPath(name).relative_to(folder): name for name in self.files if is_below(name, folder)}
        if str(folder) in self.files:
            inside[PurePosixPath()] = str(folder)
        if not inside:
            raise of_number(errno.ENOENT, source)
        return inside

    async def archive(
        self,
        path: str = ".",
        target: str | Path | None = None,
        *,
        limit: int = FILE_LIMIT,
        timeout_s: float = 30.0,
    ) -> bytes:
        """Return the files as a tar archive, or write it to `target`."""
        self._begin(timeout_s)
        check_limit("limit", limit)
        inside = sorted(self._inside(path).items())
        names = {str(below) if below.parts else PurePosixPath(name).name: name for below, name in inside}
        packed = tar_of({name: self.files[source] for name, source in names.items()}, limit)
        if target is None:
            return packed
        store({Path(target): packed})
        return b""

    async def unpack(self, archive: bytes | str | Path, path: str = ".", *, timeout_s: float = 30.0) -> None:
        """Keep the files of a tar archive; ValueError for what is none."""
        self._begin(timeout_s)
        if not isinstance(archive, Path):
            check_data("archive", archive)
        data = await asyncio.to_thread(load_archive, Path(archive)) if isinstance(archive, (str, Path)) else archive
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    if content is not None:
                        self.files[path_of(f"{path}/{member.name}")] = content.read()
        except tarfile.TarError as error:
            raise ValueError(f"this is no tar archive, or not all of it: {error}") from None

    def requests(self) -> Sequence[NetworkRequest]:
        """Return nothing: a fake box has no network."""
        self.lifetime.check()
        return []

    def port(self, port: int, *, timeout_s: float = 10.0) -> AbstractAsyncContextManager[LocalAddress]:
        """Refuse: a fake box has no network."""
        self.lifetime.check()
        raise ValueError("port: a FakeBox has no network")

    def service(self, name: str) -> BoxService:
        """Refuse: a fake box has no services."""
        self.lifetime.check()
        raise ValueError(f"service: a FakeBox has none named {name!r}")

    async def snapshot(self, path: str | Path, *, limit: int = 1 << 30, timeout_s: float = 120.0) -> None:
        """Write the files to a tar file; modes and times are those of no real file."""
        self._begin(timeout_s)
        check_path_here("path", path)
        store({Path(path): tar_of(self.files, limit)})

    async def restore(self, path: str | Path, *, timeout_s: float = 120.0) -> None:
        """Replace the files by those of a snapshot; ValueError for a file that is none."""
        self._begin(timeout_s)
        check_path_here("path", path)
        with open_snapshot(Path(path)) as file, tarfile.open(fileobj=file) as archive:
            contents = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
            self.files = {name: file.read() for name, file in contents.items() if file is not None}

    async def fork(self, *, timeout_s: float = 30.0) -> "FakeBox":
        """Return a box with copies of the files and of every name that can be copied; other names are shared."""
        self._begin(timeout_s)
        branch = FakeBox(self.answers, self.initial)
        branch.lifetime = Lifetime("the branch", self.lifetime)
        branch.files = dict(self.files)
        branch.namespace = {name: copied(value) for name, value in self.namespace.items()}
        return branch

    async def close(self) -> None:
        """End the branch; it holds no process."""
        self.lifetime.end("its close() was called")

    async def __aenter__(self) -> "FakeBox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def reset(self, *, timeout_s: float = 10.0) -> None:
        """Begin anew with the first files, and end all branches."""
        self._begin(timeout_s)
        self.lifetime.end_inner("the box was reset")
        self._start()


class FakeBoxes:
    """A pool of FakeBoxes; `leased` holds those in use, `made` all that were ever made."""

    def __init__(self, make: Callable[[], Box] = FakeBox) -> None:
        self.make = make
        self.leased: list[Box] = []
        self.made: list[Box] = []

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Box]:
        box = self.make()
        self.made.append(box)
        self.leased.append(box)
        try:
            yield box
        finally:
            self.leased.remove(box)
            if isinstance(box, FakeBox):
                box.lifetime.end("its lease ended")


def _ok(stdout: str) -> ExecResult:
    return ExecResult(status="ok", exit_code=0, stdout=stdout, stderr="")
