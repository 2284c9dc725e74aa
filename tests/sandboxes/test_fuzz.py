"""Random calls with random paths, contents and frames raise only documented errors and lose no sandbox."""

import asyncio
import io
import os
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from hypothesis.strategies import SearchStrategy

from agentgym.errors import SandboxError
from agentgym.sandboxes.protocol import Sandbox
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.sandboxes.remote.wire import Wire, encode
from tests.sandboxes.conftest import make

AT_ONCE = 10
"""Calls between two checks of the sandbox. Each call is a case."""
FEW, MORE = 100, 4000
FULL = 20_000
FULL_MARKS = [pytest.mark.slow, pytest.mark.proof]
LENIENT = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
NAMES = st.sampled_from(
    ["a", "b", "d", "f", ".", "..", "", " ", "é", "\udcff", "\ud800", "\0", "n" * 300, "~", "-x", "*"]
)
PATHS = st.lists(NAMES, max_size=4).map("/".join) | st.text(max_size=12) | st.sampled_from(["/", "/tmp", "/etc/passwd"])
CONTENTS = st.binary(max_size=100) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = st.lists(st.text(max_size=8), min_size=1, max_size=4).map(lambda words: ["printf", "%s ", *words])
SETUPS = [
    "ln -sn /proc/self a",
    "ln -sn . d",
    "mkfifo f",
    "rm -rf a; mkdir -p a/b/d",
    "test -L a || chmod 0 a",
    "rm -rf ./*",
    "ln -sn a a",
    "touch -h a b",
    ":",
]
"""Commands that follow no links: in an unsafe sandbox, a link could lead to this machine's files."""
TIDY = "cd; chmod -R u+rwX . 2>/dev/null; rm -rf ./* ./.[!.]*; echo fine"
LINES = [
    "x=1",
    "cd ..",
    "cd a",
    "echo $x",
    "false",
    "exit 3",
    "exec true",
    "trap '' TERM",
    "return",
    "(",
    "printf '\\0'",
]
"""Commands for a shell; none creates or removes a file."""
PIECE = 4 << 20
SIZES = [0, 1, PIECE - 1, PIECE + 1, (16 << 20) + 1]
"""Sizes of files that fit in one frame or need several."""
PORTS = [-1, 0, 1, 80, 65535, 65536, 10**20]


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, errors="surrogatepass") as tar:
        for name in draw(st.lists(PATHS.filter(lambda path: not {"\0", "\ud800"} & {*path}), max_size=3)):
            member = tarfile.TarInfo(name)
            member.type = draw(st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]))
            member.linkname = draw(st.sampled_from(["a", "..", "/proc/self"]))
            member.mode = draw(st.integers(0, 0o7777))
            tar.addfile(member)
    whole = packed.getvalue()
    return whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


SMALL: list[SearchStrategy[tuple[str, tuple[object, ...]]]] = [
    st.tuples(st.just("write"), st.tuples(st.dictionaries(PATHS, CONTENTS, max_size=3))),
    st.tuples(st.just("read"), st.tuples(PATHS, st.integers(-1, 200))),
    st.tuples(st.just("list"), st.tuples(PATHS)),
    st.tuples(st.just("put"), st.tuples(CONTENTS, PATHS)),
    st.tuples(st.just("get"), st.tuples(PATHS)),
    st.tuples(st.just("archive"), st.tuples(PATHS)),
    st.tuples(st.just("unpack"), st.tuples(archives() | st.binary(max_size=600), PATHS)),
    st.tuples(
        st.just("exec"),
        st.tuples(
            WORDS,
            st.none() | PATHS,
            st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2),
            st.none() | CONTENTS,
            st.integers(1, 50),
        ),
    ),
    st.tuples(st.just("setup"), st.tuples(st.sampled_from(SETUPS))),
    st.tuples(st.just("channel"), st.tuples(st.binary(min_size=1, max_size=60))),
    st.tuples(st.just("process"), st.tuples(WORDS, CONTENTS)),
    st.tuples(st.just("large"), st.tuples(PATHS, st.sampled_from(SIZES), st.integers(-1, 20 << 20))),
    st.tuples(st.just("stream"), st.tuples(st.integers(0, 600_000), st.integers(0, 100_000))),
    st.tuples(st.just("kill"), st.tuples(st.sampled_from([0, 1, 9, 15, 19, 64, 65]), st.booleans())),
    st.tuples(st.just("shell"), st.tuples(st.lists(st.sampled_from(LINES), max_size=4), st.none() | PATHS)),
    st.tuples(st.just("ask"), st.tuples(st.text(max_size=3), st.integers(0, 3), st.booleans())),
]
"""Actions in a sandbox and in its branches."""
CASES = st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.integers(), max_size=2)
CALLS: SearchStrategy[tuple[str, tuple[object, ...]]] = st.one_of(
    *SMALL,
    st.tuples(st.just("snapshot"), st.tuples(st.integers(-1, 20_000))),
    st.tuples(st.just("restore"), st.tuples(archives() | st.binary(max_size=600))),
    st.tuples(st.just("again"), st.tuples()),
    st.tuples(st.just("fork"), st.tuples(st.lists(st.one_of(SMALL), max_size=2))),
    st.tuples(
        st.just("verify"),
        st.tuples(
            st.sampled_from([None, "def test_a(): pass", "def test_a(): import a", "x", "\ud800"]),
            st.sampled_from([None, "true", "cat", "exit 3", "python3 -c 1", "python3 a", "'"]),
            st.none() | st.dictionaries(PATHS, CONTENTS, max_size=2),
            st.none() | CASES,
        ),
    ),
    st.tuples(st.just("port"), st.tuples(st.sampled_from(PORTS))),
    st.tuples(st.just("reset"), st.tuples()),
)


DOCUMENTED: dict[str, tuple[type[Exception], ...]] = {
    "get": (ValueError, FileNotFoundError, FileExistsError),
    "process": (ValueError, FileNotFoundError, BrokenPipeError),
    "start": (ValueError, FileNotFoundError, BrokenPipeError),
    "stream": (ValueError, FileNotFoundError, BrokenPipeError),
    "port": (ValueError, TimeoutError),
}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def call(sandbox: Sandbox, op: str, given_: tuple[object, ...], scratch: Path) -> None:
    match op, given_:
        case "read", (path, limit):
            assert len(await sandbox.read(path, limit=limit)) <= limit  # type: ignore[arg-type,operator]
        case "put", (content, path):
            (scratch / "f").write_bytes(content if isinstance(content, bytes) else str(content).encode())
            await sandbox.put(scratch / "f", path)  # type: ignore[arg-type]
        case "get", (path,):
            await sandbox.get(path, scratch / "got" / "here")  # type: ignore[arg-type]
            assert names_in(scratch) <= {"f", "got", "snapshot"}
            assert names_in(scratch / "got") <= {"here"}
        case "exec", (words, cwd, env, stdin, limit):
            await sandbox.exec(words, cwd=cwd, env=env, stdin=stdin, output_limit=limit)  # type: ignore[arg-type]
        case "setup", (command,):
            await sandbox.exec(str(command))
        case "channel", (data,):
            await sandbox.python(f"import os; os.write(3, {data!r})")
        case "process", (words, content):
            async with sandbox.start(words) as process:  # type: ignore[arg-type]
                await process.write(content)  # type: ignore[arg-type]
                await process.wait(timeout_s=20)
        case "large", (path, size, limit):
            data = bytes(cast("int", size))
            await sandbox.write({str(path): data})
            assert await sandbox.read(str(path), limit=cast("int", limit)) == data
        case "stream", (written, read):
            await stream(sandbox, written, read)  # type: ignore[arg-type]
        case "kill", (number, first):
            async with sandbox.start(["sleep", "60"]) as process:
                if first:
                    await process.kill(number)  # type: ignore[arg-type]
                await process.kill()
                assert process.exit_code is not None
        case "shell", (lines, cwd):
            async with sandbox.shell(cwd=cwd) as shell:  # type: ignore[arg-type]
                for line in lines:  # type: ignore[attr-defined]
                    await shell.run(line)
        case "ask", (name, times, fresh):
            await sandbox.python(f"for _ in range({times}): {name}(1)", functions={str(name): abs}, fresh=bool(fresh))
        case "snapshot", (limit,):
            await sandbox.snapshot(scratch / "snapshot", limit=limit)  # type: ignore[arg-type]
            assert (scratch / "snapshot").stat().st_size <= limit  # type: ignore[operator]
        case "restore", (content,):
            (scratch / "f").write_bytes(content)  # type: ignore[arg-type]
            await sandbox.restore(scratch / "f")
        case "again", ():
            await sandbox.write({"kept/file": "kept"})
            await sandbox.snapshot(scratch / "snapshot")
            await sandbox.exec(TIDY)
            await sandbox.restore(scratch / "snapshot")
            assert await sandbox.read("kept/file") == b"kept"
        case "fork", (calls,):
            async with await sandbox.fork() as branch:
                await play(branch, calls)  # type: ignore[arg-type]
        case "verify", (code, command, files, expect):
            await sandbox.verify(code=code, command=command, files=files, expect=expect)  # type: ignore[arg-type]
        case "port", (number,):
            async with sandbox.port(number, timeout_s=0.01):  # type: ignore[arg-type]
                raise AssertionError(f"nothing listens at port {number}")
        case _:
            await getattr(sandbox, op)(*given_)


async def stream(sandbox: Sandbox, written: int, read: int) -> None:
    """Read the first `read` bytes that a program writes and skip the rest."""
    async with sandbox.start(["head", "-c", str(written), "/dev/zero"]) as process:
        got = 0
        while got < read and (piece := await process.stdout.read(min(read - got, 5000))):
            got += len(piece)
        assert got == min(read, written)


async def play(sandbox: Sandbox, calls: list[tuple[str, tuple[object, ...]]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for op, arguments in calls:
            with suppress(*DOCUMENTED.get(op, (ValueError, FileNotFoundError))):
                await call(sandbox, op, arguments, Path(scratch))
    assert (await sandbox.python("6 * 7")).stdout == "42\n"
    assert (await sandbox.exec(TIDY)).stdout == "fine\n"


def test_no_command_of_the_fuzzer_leaves_the_working_folder_through_a_link(tmp_path: Path) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    for number, command in enumerate([*SETUPS, TIDY]):
        for folder in (work / str(number), outside / "b" / "d"):
            folder.mkdir(parents=True, exist_ok=True)
        (outside / "file").touch(0o640)
        for name, target in (("a", outside), ("b", outside / "file"), ("d", outside), ("f", outside / "new")):
            (work / str(number) / name).symlink_to(target)
        before = {path: path.lstat()[:9] for path in [outside, *outside.rglob("*")]}
        environment = {**os.environ, "HOME": str(work / str(number))}
        subprocess.run(["sh", "-c", command], cwd=work / str(number), env=environment, capture_output=True)
        assert {path: path.lstat()[:9] for path in [outside, *outside.rglob("*")]} == before, command


@pytest.mark.parametrize(
    ("kind", "settings_", "cases"),
    [
        ("unsafe", {}, FEW),
        ("bubblewrap", {"network": "loopback"}, FEW),
        pytest.param("bubblewrap", {}, MORE, marks=pytest.mark.slow),
        pytest.param("docker", {}, 2000, marks=[pytest.mark.docker, pytest.mark.slow]),
        pytest.param("bubblewrap", {}, FULL, marks=FULL_MARKS),
        pytest.param("bubblewrap", {"network": "loopback"}, FULL, marks=FULL_MARKS),
    ],
)
def test_no_call_raises_an_undocumented_error_or_loses_the_sandbox(
    kind: str, settings_: dict[str, object], cases: int
) -> None:
    with asyncio.Runner() as runner:
        pool = make(kind, **settings_).open(1)
        sandboxes = runner.run(pool.__aenter__())
        lease = sandboxes.lease()
        sandbox = runner.run(lease.__aenter__())
        made = 0

        @settings(max_examples=cases // AT_ONCE, deadline=None, suppress_health_check=LENIENT)
        @given(st.lists(CALLS, min_size=AT_ONCE, max_size=AT_ONCE))
        def law(calls: list[tuple[str, tuple[object, ...]]]) -> None:
            nonlocal made
            runner.run(play(sandbox, calls))
            made += len(calls)

        try:
            law()
        finally:
            runner.run(lease.__aexit__(None, None, None))
            runner.run(pool.__aexit__(None, None, None))
    assert made >= cases


# ---------------------------------------------------------------------------------------------- data that a sandbox
# sends

VALUES: SearchStrategy[object] = st.integers(-3, 3) | st.sampled_from(
    ["out", "err", "in", "all", "ok", "sandbox_killed", "a", "..", "", None, [], {}, [[]], 1e9, 1e400, True, 10**400]
)
RESULT = {"status": "ok", "exit_code": 0, "stdout": 0, "stderr": 0, "state_lost": False, "truncated": False}
OF_CALLS = ["id", "ask", "part", "more", "executable", "body", "seconds", *RESULT]
OF_PROGRAMS = ["process", "of", "closed", "exit", "took"]
OF_REFUSALS = ["error", "errno", "gone", "not_a_file", "clean", "why"]
FIELDS = st.dictionaries(st.sampled_from(OF_CALLS + OF_PROGRAMS + OF_REFUSALS), VALUES, max_size=4)
BEGINNINGS: list[dict[str, object]] = [
    {},
    {"id": 1},
    {"id": 2},
    {"process": 1},
    {"id": 1, "ask": 1},
    {"id": 1, "part": 1},
    {"id": 1, "error": "no", "errno": 2},
    {"id": 1, "seconds": 0.1, **RESULT},
]
ENVELOPES = st.builds(lambda begun, fields: {**begun, **fields}, st.sampled_from(BEGINNINGS), FIELDS)
BODIES = st.binary(max_size=8) | st.sampled_from([b'["f", [], {}]', b"..\0a/b", b"a\0b/", b"\xff", b'["f", 1, 2]'])
FRAMES = st.lists(st.tuples(ENVELOPES, BODIES), max_size=5)
OF_FILES = ["read", "list", "write", "get", "put", "archive", "unpack", "snapshot", "restore"]
OF_LARGE_FILES = ["write_large", "put_large", "archive_to_file"]
OF_PROCESSES = ["start", "stream", "kill", "shell", "runs"]
OPS = ["exec", "python", "fresh", "verify", "fork", "reset", *OF_PROCESSES, *OF_FILES, *OF_LARGE_FILES]
"""Every call that sends data over the wire; `port` uses separate sockets."""


def said(frames: list[tuple[dict[str, object], bytes]], tail: bytes) -> Iterator[bytes]:
    for envelope, body in frames:
        yield encode(envelope, b"" if "body" in envelope else body)
        yield body if "body" in envelope else b""
    yield tail


LARGE = bytes((16 << 20) + 1)


async def use(sandbox: RemoteSandbox, op: str, scratch: Path) -> None:
    """Make one call of the sandbox; `scratch` holds the files f and large."""
    match op:
        case "python":
            await sandbox.python("f()", functions={"f": lambda *_, **__: 1})
        case "fresh":
            await sandbox.python("1", fresh=True)
        case "verify":
            await sandbox.verify(command="true")
        case "write":
            await sandbox.write({"a": "b"})
        case "write_large":
            await sandbox.write({"a": LARGE})
        case "put_large":
            await sandbox.put(scratch / "large", "a")
        case "archive_to_file":
            await sandbox.archive("a", scratch / "got")
        case "get":
            await sandbox.get("a", scratch / "got")
        case "put" | "snapshot" | "restore":
            await getattr(sandbox, op)(scratch / "f")
        case "unpack":
            await sandbox.unpack(b"x")
        case "start":
            async with sandbox.start("x") as process:
                await process.stdout.read()
                await process.write("x")
                await process.wait()
        case "stream":
            async with sandbox.start("x") as process:
                async for _ in process.stderr:
                    pass
                await process.close_stdin()
        case "kill":
            async with sandbox.start("x") as process:
                await process.kill(15)
                await process.kill()
        case "runs":
            async with sandbox.shell(cwd="a") as shell:
                await shell.run("x")
                await shell.run("y", output_limit=1)
        case "fork":
            async with await sandbox.fork() as branch:
                await branch.python("1")
                await branch.verify(code="def test_a(): pass")
        case "shell":
            async with sandbox.shell() as shell:
                await shell.run("x")
        case "reset":
            await sandbox.reset()
        case _:
            await getattr(sandbox, op)("x")


async def end() -> None:
    """Do nothing: the peer of this connection is not a process."""


async def converse(op: str, words: bytes, scratch: Path) -> None:
    """Make a call of a sandbox that sends these bytes once it receives the call, if it does, and nothing after them."""
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        theirs.send(encode({"hello": 2, "python": "3"}))
        sandbox = await RemoteSandbox.open(await Wire.over(ours), digest="fake", end=end)
        using = asyncio.create_task(use(sandbox, op, scratch))
        heard = asyncio.ensure_future(loop.sock_recv(theirs, 1 << 16))
        await asyncio.wait({heard, using}, return_when=asyncio.FIRST_COMPLETED)  # An invalid snapshot is never sent.
        heard.cancel()
        theirs.send(words)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(SandboxError, *DOCUMENTED.get(op, (ValueError, FileNotFoundError))):
            await using
        await sandbox.close()
    assert complaints == []


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MORE, marks=pytest.mark.slow), pytest.param(FULL, marks=FULL_MARKS)]
)
def test_whatever_a_sandbox_sends_is_a_result_or_ends_the_sandbox(cases: int, tmp_path: Path) -> None:
    made = 0
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "f").write_bytes(b"x")
    (scratch / "large").write_bytes(LARGE)
    with asyncio.Runner() as runner:

        @settings(max_examples=cases, deadline=None, suppress_health_check=LENIENT)
        @given(FRAMES, st.binary(max_size=40), st.sampled_from(OPS))
        @example([({"process": 1, "closed": []}, b"")], b"", "start")
        @example([({"id": 1, **RESULT, "seconds": 10**400}, b"")], b"", "exec")
        def law(frames: list[tuple[dict[str, object], bytes]], tail: bytes, op: str) -> None:
            nonlocal made
            runner.run(converse(op, b"".join(said(frames, tail)), scratch))
            made += 1
            if op in ("get", "archive_to_file"):
                assert names_in(tmp_path) == {"scratch"}
                assert names_in(scratch) <= {"f", "large", "got"}
                subprocess.run(["rm", "-rf", scratch / "got"], check=True)

        law()
    assert made >= cases
