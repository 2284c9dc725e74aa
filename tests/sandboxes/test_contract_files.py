"""What every kind of box promises of files of any size, of archives, and of the errors of file calls."""

import asyncio
import hashlib
import io
import resource
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentgym.sandboxes.docker import settings
from agentgym.sandboxes.protocol import Box
from agentgym.sandboxes.protocol.content import UnusablePath
from tests.sandboxes.conftest import KINDS, make

pytestmark = pytest.mark.asyncio(loop_scope="module")

MB = 1 << 20


def pattern(size: int) -> Iterator[bytes]:
    """Bytes in which no two pieces are the same."""
    for number in range(0, size, MB):
        yield hashlib.sha256(str(number).encode()).digest() * (MB // 32)


async def test_bytes_over_one_frame_go_in_and_out_whole(box: Box) -> None:
    data = b"".join(pattern(33 * MB)) + b"end"
    await box.write({"a/large": data, "small": "s", "empty": b""})
    assert await box.read("a/large", limit=len(data)) == data
    assert await box.read("small") == b"s"
    assert await box.list("a") == ["large"]
    with pytest.raises(ValueError, match="the limit is"):
        await box.read("a/large", limit=len(data) - 1)
    await box.write({"a/large": "now small"})
    assert await box.read("a/large") == b"now small"


@dataclass(frozen=True)
class Source:
    """A large file of this machine, of that many megabytes."""

    path: Path
    megabytes: int
    sha256: str


@contextmanager
def source_of(megabytes: int, folder: Path) -> Iterator[Source]:
    """A file in which no two pieces are the same, until the end of the block."""
    path = folder / "source"
    with path.open("wb") as file:
        file.writelines(pattern(megabytes * MB))
    path.chmod(0o755)
    yield Source(path, megabytes, digest(path))
    path.unlink()


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with source_of(1024, tmp_path_factory.mktemp("gigabyte")) as source:
        yield source


async def test_a_large_file_is_streamed_out_and_in_with_bounded_memory(box: Box, tmp_path: Path) -> None:
    with source_of(64, tmp_path) as source:
        await a_file_goes_in_and_out(box, source, tmp_path / "back")
    with pytest.raises(ValueError, match="the limit is"):
        await box.get("in/large", tmp_path / "refused", limit=64 * MB - 1)
    assert names_in(tmp_path) == []


SPARE_MB = 96
"""The memory of a container beside that of the file in it: it would end where its server held more than pieces."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.docker) for kind in KINDS[2:])])
async def test_a_gigabyte_is_streamed_out_and_in_where_the_memory_beside_it_is_small(
    kind: str, gigabyte: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_mb = gigabyte.megabytes + 1
    sizes = {"unsafe": {"memory_mb": 128}, "bubblewrap": {"memory_mb": 128, "disk_mb": disk_mb}}
    container = {"memory_mb": SPARE_MB, "disk_mb": disk_mb}
    monkeypatch.setattr(settings, "FOLDERS", 1)
    async with make(kind, **sizes.get(kind, container)).open(1) as boxes, boxes.lease() as box:
        await a_file_goes_in_and_out(box, gigabyte, tmp_path / "back")


async def a_file_goes_in_and_out(box: Box, source: Source, back: Path) -> None:
    """The file is whole at both ends, and this process holds a few pieces of it at a time."""
    await box.write({"small": bytes(17 * MB)})  # What every transfer loads is loaded by now.
    await box.exec("rm small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen: list[int] = []
    try:
        await box.put(source.path, "in/large", timeout_s=300)
        assert (await box.exec("sha256sum in/large", timeout_s=100)).stdout.startswith(f"{source.sha256} ")
        await box.get("in/large", back, limit=source.megabytes * MB, timeout_s=300, progress=seen.append)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert (digest(back), mode_of(back)) == (source.sha256, 0o755)
    finally:
        remove(back)
    assert grown < 48 << 10
    assert seen == sorted(seen)
    assert seen[-1] == source.megabytes * MB


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def test_a_large_file_that_is_broken_off_leaves_nothing(box: Box, tmp_path: Path) -> None:
    with (tmp_path / "source").open("wb") as file:
        file.truncate(64 * MB)
    copying = asyncio.create_task(box.put(tmp_path / "source", "in"))
    while not (await box.exec("ls -A")).stdout:
        assert not copying.done()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert await box.list() == []
    await box.write({"large": bytes(40 * MB)})
    reading = asyncio.create_task(box.read("large", limit=40 * MB))
    await asyncio.sleep(0)
    reading.cancel()
    assert await box.read("large", limit=40 * MB) == bytes(40 * MB)


async def test_a_large_file_follows_no_link_and_replaces_no_folder(box: Box, tmp_path: Path) -> None:
    await box.exec("echo safe > real; ln -s real link; mkdir folder; mkdir outer; ln -s outer out")
    with pytest.raises(UnusablePath):
        await box.write({"folder": bytes(17 * MB)})
    with pytest.raises(UnusablePath):
        await box.write({"out/f": bytes(17 * MB)})
    with pytest.raises(ValueError, match="'link' is a link"):
        await box.write({"link": bytes(17 * MB)})
    assert await box.read("real") == b"safe\n"
    assert await box.list("outer") == await box.list("folder") == []


async def test_a_folder_goes_out_and_in_as_one_archive(box: Box, tmp_path: Path) -> None:
    await box.write({"d/a/b.txt": "bé", "d/run": "#!/bin/sh\necho ran", "d/empty": ""})
    await box.exec("chmod 755 d/run; ln -s a/b.txt d/link; mkfifo d/pipe; mkdir d/none; touch \"$(printf 'd/\\377')\"")
    packed = await box.archive("d")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert sorted(tar.getnames(), key=ascii) == sorted(
            ["a", "a/b.txt", "empty", "link", "none", "run", "\udcff"], key=ascii
        )
    await box.unpack(packed, "copy")
    assert (await box.exec("copy/run; cat copy/link; readlink copy/link")).stdout == "ran\nbéa/b.txt\n"
    assert await box.list("copy/none") == []
    assert await box.archive("d", tmp_path / "here/d.tar") == b""
    assert (tmp_path / "here/d.tar").read_bytes() == packed
    await box.unpack(tmp_path / "here/d.tar", "again")
    assert await box.list("again") == await box.list("copy")
    await box.exec("chmod 640 copy/run; ln copy/run copy/same; touch -d @5.5 copy/run; chmod 0 copy/empty")
    await box.unpack(await box.archive("copy"), "exact")
    shown = await box.exec(
        "stat -c '%a %.1Y' exact/run; stat -c %a exact/empty; test exact/run -ef exact/same && echo one"
    )
    assert shown.stdout == "640 5.5\n0\none\n"
    one = await box.archive("d/a/b.txt")
    await box.unpack(one)
    assert await box.read("b.txt") == "bé".encode()


async def test_compressed_archives_and_large_ones_are_unpacked(box: Box, tmp_path: Path) -> None:
    for mode in ("w:gz", "w:xz", "w"):
        with tarfile.open(tmp_path / "t.tar", mode) as tar:
            member = tarfile.TarInfo("large")
            member.size = 20 * MB
            tar.addfile(member, io.BytesIO(bytes(20 * MB)))
        await box.unpack(tmp_path / "t.tar", "x")
        assert (await box.exec("wc -c < x/large")).stdout == f"{20 * MB}\n"


async def test_an_archive_over_its_limit_is_refused_and_nothing_is_written(box: Box, tmp_path: Path) -> None:
    await box.write({"large": bytes(MB)})
    with pytest.raises(ValueError, match="limit"):
        await box.archive(".", limit=MB)
    with pytest.raises(ValueError, match="limit"):
        await box.archive(".", tmp_path / "t.tar", limit=MB)
    assert names_in(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        await box.archive("none")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "in/link/out"])
async def test_no_name_in_an_archive_leads_out_of_the_folder(box: Box, name: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in ("in/first", name):
            tar.addfile(tarfile.TarInfo(path), io.BytesIO())
    await box.exec("mkdir -p outer t/in; ln -s ../../outer t/in/link")
    with pytest.raises(ValueError, match=r"outside|Not a directory"):
        await box.unpack(packed.getvalue(), "t")
    assert await box.list("t/in") == ["first", "link"]
    assert await box.list("outer") == []


async def test_what_is_no_archive_is_refused(box: Box) -> None:
    for data in (b"", b"no archive", bytes(range(256)) * 100):
        with pytest.raises(ValueError, match="no tar archive"):
            await box.unpack(data)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        pipe = tarfile.TarInfo("pipe")
        pipe.type = tarfile.FIFOTYPE
        tar.addfile(pipe)
    with pytest.raises(ValueError, match="no file, folder or link"):
        await box.unpack(packed.getvalue())


async def test_what_code_does_to_its_files_is_a_documented_error(box: Box) -> None:
    await box.exec("mkdir d closed; echo x > closed/f; echo x > f; ln -s f link; ln -s loop loop; mkfifo pipe")
    await box.exec("cp /bin/sleep busy; echo x > secret; chmod 0 secret closed")
    for path in ("d", "link", "loop", "pipe", "f/g", ".", "/", "../x", "n" * 300, "\0", "link/x"):
        for call in (box.read(path), box.get(path + "/", "unused") if path in ("loop", "f/g") else box.read(path)):
            with pytest.raises((ValueError, FileNotFoundError)):
                await call
    for path in ("d", "pipe", "f/g", ".", "../x", "n" * 300, "loop/x"):
        with pytest.raises(ValueError):  # noqa: PT011  # Each has its own text.
            await box.write({path: "x"})
    for path in ("f", "loop", "../x", "f/g"):
        with pytest.raises(ValueError):  # noqa: PT011  # Each has its own text.
            await box.list(path)
    async with box.start(["./busy", "60"]):
        with suppress(UnusablePath):  # A new file of that name may take its place.
            await box.write({"busy": "x"})
    if (await box.exec("cat secret")).exit_code:  # Root may read it.
        for call in (box.read("secret"), box.read("closed/f")):
            with pytest.raises(ValueError, match="Permission"):
                await call
    assert await box.read("f") == b"x\n"
