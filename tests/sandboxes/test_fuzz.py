"""Random calls with random paths, contents and frames: only documented exceptions, and no box is lost."""

import asyncio
import io
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agentgym.boxes import Box
from agentgym.errors import SandboxError
from agentgym.sandboxes.box import RemoteBox
from agentgym.sandboxes.wire import Wire, encode
from tests.sandboxes.conftest import make

FEW, MANY = 150, 20_000
LENIENT = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
NAMES = st.sampled_from(
    ["a", "b", "d", "f", ".", "..", "", " ", "é", "\udcff", "\ud800", "\0", "n" * 300, "~", "-x", "*"]
)
PATHS = st.lists(NAMES, max_size=4).map("/".join) | st.text(max_size=12) | st.sampled_from(["/", "/tmp", "/etc/passwd"])
CONTENTS = st.binary(max_size=100) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = st.lists(st.text(max_size=8), min_size=1, max_size=4).map(lambda words: ["printf", "%s ", *words])
SETUPS = st.sampled_from(
    [
        "ln -s /etc a",
        "ln -s . d",
        "mkfifo f",
        "mkdir -p a/b/d",
        "chmod 0 a",
        "rm -rf ./*",
        "ln -s a a",
        "touch a b",
        ":",
    ]
)


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, errors="surrogatepass") as tar:
        for name in draw(st.lists(PATHS.filter(lambda path: not {"\0", "\ud800"} & {*path}), max_size=3)):
            member = tarfile.TarInfo(name)
            member.type = draw(st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]))
            member.linkname = draw(st.sampled_from(["a", "..", "/etc"]))
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
            try:
                await call(box, op, arguments, Path(scratch))
            except (ValueError, FileNotFoundError, BrokenPipeError, FileExistsError):
                continue
    assert (await box.python("6 * 7")).stdout == "42\n"
    assert (await box.exec("cd; chmod -R u+rwX . 2>/dev/null; rm -rf ./* ./.[!.]*; echo fine")).stdout == "fine\n"


@pytest.mark.parametrize("kind", ["unsafe", "bubblewrap"])
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_call_raises_what_is_not_documented_or_loses_the_box(kind: str, examples: int) -> None:
    with asyncio.Runner() as runner:
        pool = make(kind).open(1)
        boxes = runner.run(pool.__aenter__())
        lease = boxes.lease()
        box = runner.run(lease.__aenter__())

        @settings(max_examples=examples, deadline=None, suppress_health_check=LENIENT)
        @given(st.lists(CALLS, min_size=1, max_size=6))
        def law(calls: list[tuple[str, tuple[object, ...]]]) -> None:
            runner.run(play(box, calls))

        try:
            law()
        finally:
            runner.run(lease.__aexit__(None, None, None))
            runner.run(pool.__aexit__(None, None, None))


FIELDS: SearchStrategy[dict[str, object]] = st.dictionaries(
    st.sampled_from(
        ["id", "process", "of", "ask", "closed", "exit", "took", "status", "stdout", "body", "error", "errno"]
    ),
    st.integers(-3, 3) | st.sampled_from(["out", "in", "all", "ok", None, [], {}, 1e9, True]),
)
FRAMES = st.lists(st.tuples(FIELDS, st.binary(max_size=8)), max_size=4)


def said(frames: list[tuple[dict[str, object], bytes]], tail: bytes) -> Iterator[bytes]:
    for envelope, body in frames:
        claimed = envelope.pop("body", None)
        yield encode(envelope, body) if claimed is None else encode({**envelope, "body": claimed})
    yield tail


@given(FRAMES, st.binary(max_size=40), st.sampled_from(["exec", "read", "list", "start", "reset"]))
@settings(max_examples=FEW, deadline=None)
async def test_whatever_a_box_says_is_a_result_or_an_end_of_the_box(
    frames: list[tuple[dict[str, object], bytes]], tail: bytes, op: str
) -> None:
    ours, theirs = socket.socketpair()
    wire = await Wire.over(ours)

    async def end() -> None:
        """A box without anything to end."""

    with theirs:
        theirs.sendall(encode({"hello": 2, "python": "3"}))
        box = await RemoteBox.open(wire, digest="fake", end=end)
        theirs.sendall(b"".join(said(frames, tail)))
    try:
        if op == "start":
            async with box.start("x") as process:
                await process.wait()
        elif op == "reset":
            await box.reset()
        else:
            await getattr(box, op)("x")
    except (SandboxError, ValueError, FileNotFoundError):
        pass
    await box.close()
    await asyncio.sleep(0)
