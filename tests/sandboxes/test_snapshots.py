"""Snapshots of a working folder: exact, safe against hostile names on both sides, and different from branches."""

import asyncio
import gzip
import io
import os
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from agentgym.sandboxes.fake.sandbox import FakeSandbox
from agentgym.sandboxes.protocol import Sandbox, SandboxPool, SandboxSpec
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


async def shown(sandbox: Sandbox) -> list[str]:
    done = await sandbox.exec(SHOW)
    return done.stdout.splitlines()


async def test_a_snapshot_is_restored_exactly(sandbox: Sandbox, tmp_path: Path) -> None:
    assert (await sandbox.exec(MAKE)).ok
    before = await shown(sandbox)
    assert len(before) > 8
    await sandbox.snapshot(tmp_path / "it.tar")
    assert names_in(tmp_path) == ["it.tar"]
    assert await shown(sandbox) == before
    await sandbox.exec("rm -rf folder large; echo later > later")
    await sandbox.restore(tmp_path / "it.tar")
    assert await shown(sandbox) == before
    assert (
        await sandbox.exec("chmod 700 closed; chmod 600 closed/file; cat closed/file; test -e pipe")
    ).stdout == "secret"
    assert (await sandbox.exec("stat -c %a closed folder/file; test folder/file -ef folder/again")).ok


async def test_a_snapshot_is_restored_in_another_kind_of_sandbox(tmp_path: Path) -> None:
    one, other = make("bubblewrap"), make("unsafe")
    async with one.open(1) as pool, pool.lease() as sandbox:
        await sandbox.exec(MAKE)
        before = await shown(sandbox)
        await sandbox.snapshot(tmp_path / "it.tar")
    async with other.open(1) as pool, pool.lease() as sandbox:
        await sandbox.restore(tmp_path / "it.tar")
        assert await shown(sandbox) == before


async def test_a_snapshot_of_a_branch_has_the_branchs_files(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write({"f": "trunk"})
    async with await sandbox.fork() as branch:
        await branch.write({"f": "branch"})
        await branch.snapshot(tmp_path / "branch.tar")
        await sandbox.snapshot(tmp_path / "trunk.tar")
        await branch.restore(tmp_path / "trunk.tar")
        assert await branch.read("f") == b"trunk"
    await sandbox.restore(tmp_path / "branch.tar")
    assert await sandbox.read("f") == b"branch"


async def test_a_session_continues_after_a_snapshot_and_is_stopped_during_it(sandbox: Sandbox, tmp_path: Path) -> None:
    code = (
        "import threading\nrunning = True\ndef write():\n    while running:\n        open('f', 'w').write('x' * 9999)\n"
    )
    await sandbox.python(code + "threading.Thread(target=write, daemon=True).start()")
    for number in range(5):
        await sandbox.snapshot(tmp_path / f"{number}.tar")
    assert (await sandbox.python("running = False\nrunning")).stdout == "False\n"


async def test_a_background_program_can_be_sent_input_during_a_snapshot(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("head -c 30000000 /dev/urandom > f")
    async with sandbox.start(["cat"]) as process:
        call = asyncio.create_task(sandbox.snapshot(tmp_path / "it.tar"))
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
    "a truncated file with an end marker": lambda: (
        tar_of(entry("good"), entry("wicked", size=5000))[:2048] + bytes(1024)
    ),
    "a deeply nested folder": lambda: tar_of(entry("/".join(["d"] * 300), tarfile.DIRTYPE)),
    "too much data": lambda: tar_of(*[entry(f"f{number}", size=40 << 20) for number in range(4)]),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_an_invalid_snapshot_writes_nothing_anywhere(
    isolated_sandbox: Sandbox, tmp_path: Path, what: str
) -> None:
    await isolated_sandbox.write({"f": "old"})
    (tmp_path / "it.tar").write_bytes(HOSTILE[what]())
    with pytest.raises(ValueError, match=r"."):
        await isolated_sandbox.restore(tmp_path / "it.tar")
    assert await isolated_sandbox.list() == []
    found = await isolated_sandbox.exec("find / -name '*wicked*' -not -path '/proc/*' 2>/dev/null; ls -A /dev/shm")
    assert found.stdout == ""
    assert (await isolated_sandbox.python("1 + 1")).stdout == "2\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "it is empty", id="nothing"),
        pytest.param(b"text" * 1000, "it does not begin like a tar file", id="text"),
        pytest.param(gzip.compress(tar_of(entry("f"))), "it does not begin like a tar file", id="compressed"),
        pytest.param(tar_of(entry("f", size=5000))[:300], "it does not begin like a tar file", id="half_a_header"),
        pytest.param(tar_of(entry("f", size=5000))[:3072], "it is truncated after 3072 bytes", id="half"),
        pytest.param(tar_of(entry("f", size=5000))[:-3], "it is truncated after 10237 bytes", id="all_but_the_end"),
        pytest.param(None, "it is a folder", id="a_folder"),
    ],
)
async def test_an_invalid_snapshot_is_named_and_the_folder_stays(
    sandbox: Sandbox, tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "it.tar"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    fake = FakeSandbox(files={"f": "old"})
    await sandbox.write({"f": "old"})
    for each in (sandbox, fake):
        with pytest.raises(ValueError, match=rf"path: '.*it.tar' is not a snapshot: {why}; make one with"):
            await each.restore(path)
        assert await each.read("f") == b"old"


async def test_an_empty_folder_has_a_snapshot(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.snapshot(tmp_path / "it.tar")
    await sandbox.write({"f": "x"})
    await sandbox.restore(tmp_path / "it.tar")
    assert await sandbox.list() == []


async def test_a_snapshot_over_its_limit_leaves_no_file(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("head -c 3000000 /dev/zero > f; truncate -s 100000000 sparse")
    with pytest.raises(ValueError, match="the snapshot exceeds the limit of 2097152 bytes"):
        await sandbox.snapshot(tmp_path / "it.tar", limit=2 << 20)
    assert names_in(tmp_path) == []
    assert (await sandbox.exec("wc -c < f")).stdout == "3000000\n"


def is_written_in(folder: Path) -> bool:
    """Return whether this process has a file in that folder open, with or without a name."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith(str(folder)):
                return True
    return False


async def test_a_cancelled_snapshot_leaves_no_file_and_the_sandbox_continues(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("head -c 30000000 /dev/urandom > f")
    call = asyncio.create_task(sandbox.snapshot(tmp_path / "it.tar"))
    while not is_written_in(tmp_path):  # noqa: ASYNC110
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert names_in(tmp_path) == []
    assert (await sandbox.exec("wc -c < f")).stdout == "30000000\n"


async def test_a_folder_that_is_too_deep_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.python("import os\nfor _ in range(110):\n    os.mkdir('d'); os.chdir('d')")
    with pytest.raises(ValueError, match="over 100 folders deep"):
        await sandbox.snapshot(tmp_path / "it.tar")
    assert names_in(tmp_path) == []


async def test_names_in_a_sandbox_never_become_names_on_this_machine(isolated: SandboxSpec, tmp_path: Path) -> None:
    """A sandbox whose server lies sends a tar file like any other: it is stored and never unpacked here."""
    async with isolated.open(1) as sandboxes, sandboxes.lease() as sandbox:
        await sandbox.exec("mkdir -p a; ln -s / a/root")
        await sandbox.snapshot(tmp_path / "it.tar")
    assert names_in(tmp_path) == ["it.tar"]
    with tarfile.open(tmp_path / "it.tar") as archive:
        assert archive.getnames() == ["a", "a/root"]


async def test_a_branch_shares_open_files_and_memory_with_its_session_a_snapshot_nothing(
    sandboxes: SandboxPool, tmp_path: Path
) -> None:
    async with sandboxes.lease() as sandbox:
        code = "import mmap, os\nfile = open('f', 'w+')\nfile.write('abc'); file.flush()\nshared = mmap.mmap(-1, 1)"
        await sandbox.python(code)
        await sandbox.snapshot(tmp_path / "it.tar")
        async with await sandbox.fork() as branch:
            await branch.python("_ = file.seek(0, os.SEEK_END); file.write('def'); file.flush()\nshared[0] = 7")
            assert (await sandbox.exec("cat f")).stdout == "abcdef"
            assert (await sandbox.python("shared[0]")).stdout == "7\n"
            assert await branch.read("f") == b"abc"
        await sandbox.restore(tmp_path / "it.tar")
        await sandbox.python("file.write('ghi'); file.flush()")
        assert await sandbox.read("f") == b"abc"
    assert os.path.getsize(tmp_path / "it.tar") < 1 << 20  # noqa: PTH202, ASYNC240
