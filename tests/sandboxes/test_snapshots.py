"""Snapshots of a working folder: exact, safe against hostile names on both sides, and what a branch shares instead."""

import asyncio
import gzip
import io
import os
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from agentgym.sandboxes.fake.box import FakeBox
from agentgym.sandboxes.protocol import Box, Boxes, Sandbox
from tests.sandboxes.conftest import make

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAKE = r"""
mkdir -p folder/inner 'a name' closed
printf content > folder/file; chmod 4751 folder/file
ln folder/file folder/again; ln -s /etc/passwd out; ln -s nowhere dangling
printf x > "$(printf 'odd\377\nname')"
printf secret > closed/file; chmod 0 closed/file; chmod 0 closed
head -c 3000000 /dev/urandom > large
touch -h -d '2001-02-03 04:05:06.123456789' folder/inner out large
touch -d '1969-01-01 00:00:00.5' 'a name'
mkfifo pipe
"""
SHOW = r"""
find . -mindepth 1 \( -type d -printf '%p %m %T@\n' -o ! -type p -printf '%p %m %s %T@ %y %l %n\n' \) 2>/dev/null \
    | grep -v '^./closed/' | sort
sha1sum large"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def shown(box: Box) -> list[str]:
    done = await box.exec(SHOW)
    return done.stdout.splitlines()


async def test_a_snapshot_is_restored_exactly(box: Box, tmp_path: Path) -> None:
    assert (await box.exec(MAKE)).ok
    before = await shown(box)
    assert len(before) > 8
    await box.snapshot(tmp_path / "it.tar")
    assert names_in(tmp_path) == ["it.tar"]
    assert await shown(box) == before
    await box.exec("rm -rf folder large; echo later > later")
    await box.restore(tmp_path / "it.tar")
    assert await shown(box) == before
    assert (await box.exec("chmod 700 closed; chmod 600 closed/file; cat closed/file; test -e pipe")).stdout == "secret"
    assert (await box.exec("stat -c %a closed folder/file; test folder/file -ef folder/again")).ok


async def test_a_snapshot_is_restored_in_another_kind_of_box(tmp_path: Path) -> None:
    one, other = make("bubblewrap"), make("unsafe")
    async with one.open(1) as pool, pool.lease() as box:
        await box.exec(MAKE)
        before = await shown(box)
        await box.snapshot(tmp_path / "it.tar")
    async with other.open(1) as pool, pool.lease() as box:
        await box.restore(tmp_path / "it.tar")
        assert await shown(box) == before


async def test_a_snapshot_of_a_branch_is_of_the_branch(box: Box, tmp_path: Path) -> None:
    await box.write({"f": "trunk"})
    async with await box.fork() as branch:
        await branch.write({"f": "branch"})
        await branch.snapshot(tmp_path / "branch.tar")
        await box.snapshot(tmp_path / "trunk.tar")
        await branch.restore(tmp_path / "trunk.tar")
        assert await branch.read("f") == b"trunk"
    await box.restore(tmp_path / "branch.tar")
    assert await box.read("f") == b"branch"


async def test_a_session_goes_on_after_a_snapshot_and_what_runs_is_stopped_meanwhile(box: Box, tmp_path: Path) -> None:
    code = (
        "import threading\nrunning = True\ndef write():\n    while running:\n        open('f', 'w').write('x' * 9999)\n"
    )
    await box.python(code + "threading.Thread(target=write, daemon=True).start()")
    for number in range(5):
        await box.snapshot(tmp_path / f"{number}.tar")
    assert (await box.python("running = False\nrunning")).stdout == "False\n"


async def test_a_program_in_the_background_is_fed_during_a_snapshot(box: Box, tmp_path: Path) -> None:
    await box.exec("head -c 30000000 /dev/urandom > f")
    async with box.start(["cat"]) as process:
        call = asyncio.create_task(box.snapshot(tmp_path / "it.tar"))
        while not names_in(tmp_path):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await process.write("hello")
        await call
        assert await process.stdout.read() == b"hello"
    assert (tmp_path / "it.tar").stat().st_size > 30_000_000


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


def tar_of(*entries: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in entries:
            archive.addfile(each, io.BytesIO(b"x" * each.size))
    return file.getvalue()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a name that leads out": lambda: tar_of(entry("../dev/shm/wicked")),
    "a name that leads out later": lambda: tar_of(entry("a", tarfile.DIRTYPE), entry("a/../../dev/shm/wicked")),
    "an absolute name": lambda: tar_of(entry("/dev/shm/wicked")),
    "a file through a link": lambda: tar_of(entry("out", tarfile.SYMTYPE, "/dev/shm"), entry("out/wicked", size=3)),
    "a folder through a link": lambda: tar_of(entry("o", tarfile.SYMTYPE, ".."), entry("o/wicked", tarfile.DIRTYPE)),
    "a hard link that leads out": lambda: tar_of(entry("wicked", tarfile.LNKTYPE, "../../etc/passwd")),
    "a hard link through a link": lambda: tar_of(
        entry("etc", tarfile.SYMTYPE, "/etc"), entry("wicked", tarfile.LNKTYPE, "etc/passwd")
    ),
    "a device": lambda: tar_of(entry("wicked", tarfile.CHRTYPE)),
    "a pipe": lambda: tar_of(entry("wicked", tarfile.FIFOTYPE)),
    "a file that is cut off, with an end": lambda: (
        tar_of(entry("good"), entry("wicked", size=5000))[:2048] + bytes(1024)
    ),
    "a folder of many levels": lambda: tar_of(entry("/".join(["d"] * 300), tarfile.DIRTYPE)),
    "more than fits": lambda: tar_of(*[entry(f"f{number}", size=40 << 20) for number in range(4)]),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_file_that_is_no_snapshot_writes_nothing_anywhere(isolated_box: Box, tmp_path: Path, what: str) -> None:
    await isolated_box.write({"f": "old"})
    (tmp_path / "it.tar").write_bytes(HOSTILE[what]())
    with pytest.raises(ValueError, match=r"."):
        await isolated_box.restore(tmp_path / "it.tar")
    assert await isolated_box.list() == []
    found = await isolated_box.exec("find / -name '*wicked*' -not -path '/proc/*' 2>/dev/null; ls -A /dev/shm")
    assert found.stdout == ""
    assert (await isolated_box.python("1 + 1")).stdout == "2\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "it is empty", id="nothing"),
        pytest.param(b"text" * 1000, "it does not begin as a tar file does", id="text"),
        pytest.param(gzip.compress(tar_of(entry("f"))), "it does not begin as a tar file does", id="compressed"),
        pytest.param(tar_of(entry("f", size=5000))[:300], "it does not begin as a tar file does", id="half_a_header"),
        pytest.param(tar_of(entry("f", size=5000))[:3072], "it is cut off after 3072 bytes", id="half"),
        pytest.param(tar_of(entry("f", size=5000))[:-3], "it is cut off after 10237 bytes", id="all_but_the_end"),
        pytest.param(None, "it is a folder", id="a_folder"),
    ],
)
async def test_a_file_that_is_no_snapshot_is_named_and_the_folder_stays(
    box: Box, tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "it.tar"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    fake = FakeBox(files={"f": "old"})
    await box.write({"f": "old"})
    for each in (box, fake):
        with pytest.raises(ValueError, match=rf"path: '.*it.tar' is no snapshot: {why}; make one with"):
            await each.restore(path)
        assert await each.read("f") == b"old"


async def test_an_empty_folder_has_a_snapshot(box: Box, tmp_path: Path) -> None:
    await box.snapshot(tmp_path / "it.tar")
    await box.write({"f": "x"})
    await box.restore(tmp_path / "it.tar")
    assert await box.list() == []


async def test_a_snapshot_over_its_limit_leaves_no_file(box: Box, tmp_path: Path) -> None:
    await box.exec("head -c 3000000 /dev/zero > f; truncate -s 100000000 sparse")
    with pytest.raises(ValueError, match="the snapshot has over 2097152 bytes"):
        await box.snapshot(tmp_path / "it.tar", limit=2 << 20)
    assert names_in(tmp_path) == []
    assert (await box.exec("wc -c < f")).stdout == "3000000\n"


def is_written_in(folder: Path) -> bool:
    """Whether this process has a file of that folder open, with or without a name."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith(str(folder)):
                return True
    return False


async def test_a_snapshot_that_is_cancelled_leaves_no_file_and_the_box_goes_on(box: Box, tmp_path: Path) -> None:
    await box.exec("head -c 30000000 /dev/urandom > f")
    call = asyncio.create_task(box.snapshot(tmp_path / "it.tar"))
    while not is_written_in(tmp_path):  # noqa: ASYNC110
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert names_in(tmp_path) == []
    assert (await box.exec("wc -c < f")).stdout == "30000000\n"


async def test_a_folder_that_is_too_deep_is_refused(box: Box, tmp_path: Path) -> None:
    await box.python("import os\nfor _ in range(110):\n    os.mkdir('d'); os.chdir('d')")
    with pytest.raises(ValueError, match="over 100 folders deep"):
        await box.snapshot(tmp_path / "it.tar")
    assert names_in(tmp_path) == []


async def test_names_of_a_box_are_never_names_of_this_machine(isolated: Sandbox, tmp_path: Path) -> None:
    """A box whose server lies sends a tar file like any other: it is stored, and never unpacked here."""
    async with isolated.open(1) as boxes, boxes.lease() as box:
        await box.exec("mkdir -p a; ln -s / a/root")
        await box.snapshot(tmp_path / "it.tar")
    assert names_in(tmp_path) == ["it.tar"]
    with tarfile.open(tmp_path / "it.tar") as archive:
        assert archive.getnames() == ["a", "a/root"]


async def test_a_branch_shares_open_files_and_shared_memory_with_its_session_and_a_snapshot_nothing(
    boxes: Boxes, tmp_path: Path
) -> None:
    async with boxes.lease() as box:
        code = "import mmap, os\nfile = open('f', 'w+')\nfile.write('abc'); file.flush()\nshared = mmap.mmap(-1, 1)"
        await box.python(code)
        await box.snapshot(tmp_path / "it.tar")
        async with await box.fork() as branch:
            await branch.python("_ = file.seek(0, os.SEEK_END); file.write('def'); file.flush()\nshared[0] = 7")
            assert (await box.exec("cat f")).stdout == "abcdef"
            assert (await box.python("shared[0]")).stdout == "7\n"
            assert await branch.read("f") == b"abc"
        await box.restore(tmp_path / "it.tar")
        await box.python("file.write('ghi'); file.flush()")
        assert await box.read("f") == b"abc"
    assert os.path.getsize(tmp_path / "it.tar") < 1 << 20  # noqa: PTH202, ASYNC240
