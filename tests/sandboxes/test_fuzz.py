"""Random calls with random paths, contents and frames: only documented exceptions, and no box is lost."""

import asyncio
import io
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agentgym.boxes import Box
from agentgym.errors import SandboxError
from agentgym.sandboxes.box import RemoteBox
from agentgym.sandboxes.wire import Wire, encode
from tests.sandboxes.conftest import make

AT_ONCE = 10
"""Calls between two looks at the box. Each of them is a case."""
FEW, MORE = 250, 4000
FULL = 20_000
FULL_MARKS = [pytest.mark.slow, pytest.mark.proof]
LENIENT = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
NAMES = st.sampled_from(
    ["a", "b", "d", "f", ".", "..", "", " ", "é", "\udcff", "\ud800", "\0", "n" * 300, "~", "-x", "*"]
)
PATHS = st.lists(NAMES, max_size=4).map("/".join) | st.text(max_size=12) | st.sampled_from(["/", "/tmp", "/etc/passwd"])
CONTENTS = st.binary(max_size=100) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = st.lists(st.text(max_size=8), min_size=1, max_size=4).map(lambda words: ["printf", "%s ", *words])
SETUPS = st.sampled_from(
    [
        "ln -s /proc/self a",
        "ln -s . d",
        "mkfifo f",
        "rm -rf a; mkdir -p a/b/d",
        "test -L a || chmod 0 a",
        "rm -rf ./*",
        "ln -s a a",
        "touch -h a b",
        ":",
    ]
)
"""Commands that follow no link: in an unsafe box it would lead them to the files of this machine."""


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


CALLS: SearchStrategy[tuple[str, tuple[object, ...]]] = st.one_of(
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
    st.tuples(st.just("setup"), st.tuples(SETUPS)),
    st.tuples(st.just("channel"), st.tuples(st.binary(min_size=1, max_size=60))),
    st.tuples(st.just("process"), st.tuples(WORDS, CONTENTS)),
)


DOCUMENTED: dict[str, tuple[type[Exception], ...]] = {
    "get": (ValueError, FileNotFoundError, FileExistsError),
    "process": (ValueError, FileNotFoundError, BrokenPipeError),
    "start": (ValueError, FileNotFoundError, BrokenPipeError),
}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def call(box: Box, op: str, given_: tuple[object, ...], scratch: Path) -> None:
    match op, given_:
        case "read", (path, limit):
            assert len(await box.read(path, limit=limit)) <= limit  # type: ignore[arg-type,operator]
        case "put", (content, path):
            (scratch / "f").write_bytes(content if isinstance(content, bytes) else str(content).encode())
            await box.put(scratch / "f", path)  # type: ignore[arg-type]
        case "get", (path,):
            await box.get(path, scratch / "got" / "here")  # type: ignore[arg-type]
            assert names_in(scratch) <= {"f", "got"}
            assert names_in(scratch / "got") <= {"here"}
        case "exec", (words, cwd, env, stdin, limit):
            await box.exec(words, cwd=cwd, env=env, stdin=stdin, output_limit=limit)  # type: ignore[arg-type]
        case "setup", (command,):
            await box.exec(str(command))
        case "channel", (data,):
            await box.python(f"import os; os.write(3, {data!r})")
        case "process", (words, content):
            async with box.start(words) as process:  # type: ignore[arg-type]
                await process.write(content)  # type: ignore[arg-type]
                await process.wait(timeout_s=20)
        case _:
            await getattr(box, op)(*given_)


async def play(box: Box, calls: list[tuple[str, tuple[object, ...]]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for op, arguments in calls:
            with suppress(*DOCUMENTED.get(op, (ValueError, FileNotFoundError))):
                await call(box, op, arguments, Path(scratch))
    assert (await box.python("6 * 7")).stdout == "42\n"
    assert (await box.exec("cd; chmod -R u+rwX . 2>/dev/null; rm -rf ./* ./.[!.]*; echo fine")).stdout == "fine\n"


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("unsafe", FEW),
        ("bubblewrap", FEW),
        pytest.param("bubblewrap", MORE, marks=pytest.mark.slow),
        pytest.param("docker", 2000, marks=[pytest.mark.docker, pytest.mark.slow]),
        pytest.param("bubblewrap", FULL, marks=FULL_MARKS),
    ],
)
def test_no_call_raises_what_is_not_documented_or_loses_the_box(kind: str, cases: int) -> None:
    with asyncio.Runner() as runner:
        pool = make(kind).open(1)
        boxes = runner.run(pool.__aenter__())
        lease = boxes.lease()
        box = runner.run(lease.__aenter__())
        made = 0

        @settings(max_examples=cases // AT_ONCE, deadline=None, suppress_health_check=LENIENT)
        @given(st.lists(CALLS, min_size=AT_ONCE, max_size=AT_ONCE))
        def law(calls: list[tuple[str, tuple[object, ...]]]) -> None:
            nonlocal made
            runner.run(play(box, calls))
            made += len(calls)

        try:
            law()
        finally:
            runner.run(lease.__aexit__(None, None, None))
            runner.run(pool.__aexit__(None, None, None))
    assert made >= cases


# ---------------------------------------------------------------------------------------------- what a box says

VALUES: SearchStrategy[object] = st.integers(-3, 3) | st.sampled_from(
    ["out", "err", "in", "all", "ok", "box_killed", "a", "..", "", None, [], {}, [[]], 1e9, 1e400, True, 10**400]
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
OPS = ["exec", "python", "start", "shell", "fork", "reset", *OF_FILES]


def said(frames: list[tuple[dict[str, object], bytes]], tail: bytes) -> Iterator[bytes]:
    for envelope, body in frames:
        yield encode(envelope, b"" if "body" in envelope else body)
        yield body if "body" in envelope else b""
    yield tail


async def use(box: RemoteBox, op: str, scratch: Path) -> None:
    """One call of the box; `scratch` holds the file f."""
    match op:
        case "python":
            await box.python("f()", functions={"f": lambda *_, **__: 1})
        case "write":
            await box.write({"a": "b"})
        case "get":
            await box.get("a", scratch / "got")
        case "put" | "snapshot" | "restore":
            await getattr(box, op)(scratch / "f")
        case "unpack":
            await box.unpack(b"x")
        case "start":
            async with box.start("x") as process:
                await process.stdout.read()
                await process.write("x")
                await process.wait()
        case "fork":
            async with await box.fork() as branch:
                await branch.python("1")
        case "shell":
            async with box.shell() as shell:
                await shell.run("x")
        case "reset":
            await box.reset()
        case _:
            await getattr(box, op)("x")


async def end() -> None:
    """Nothing: what speaks here is no process."""


async def converse(op: str, words: bytes, scratch: Path) -> None:
    """Make a call of a box that says these words when it has heard of the call, and then no more."""
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        theirs.send(encode({"hello": 2, "python": "3"}))
        box = await RemoteBox.open(await Wire.over(ours), digest="fake", end=end)
        using = asyncio.create_task(use(box, op, scratch))
        await loop.sock_recv(theirs, 1 << 16)
        theirs.send(words)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(SandboxError, *DOCUMENTED.get(op, (ValueError, FileNotFoundError))):
            await using
        await box.close()
    assert complaints == []


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MORE, marks=pytest.mark.slow), pytest.param(FULL, marks=FULL_MARKS)]
)
def test_whatever_a_box_says_is_a_result_or_an_end_of_the_box(cases: int, tmp_path: Path) -> None:
    made = 0
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "f").write_bytes(b"x")
    with asyncio.Runner() as runner:

        @settings(max_examples=cases, deadline=None, suppress_health_check=LENIENT)
        @given(FRAMES, st.binary(max_size=40), st.sampled_from(OPS))
        @example([({"process": 1, "closed": []}, b"")], b"", "start")
        @example([({"id": 1, **RESULT, "seconds": 10**400}, b"")], b"", "exec")
        def law(frames: list[tuple[dict[str, object], bytes]], tail: bytes, op: str) -> None:
            nonlocal made
            runner.run(converse(op, b"".join(said(frames, tail)), scratch))
            made += 1
            if op == "get":
                assert names_in(tmp_path) == {"scratch"}
                assert names_in(scratch) <= {"f", "got"}
                subprocess.run(["rm", "-rf", scratch / "got"], check=True)

        law()
    assert made >= cases
