"""The contract of every kind of sandbox for files of any size, for archives, and for errors of file calls."""

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
from agentgym.sandboxes.protocol import Sandbox
from agentgym.sandboxes.protocol.content import UnusablePath
from tests.sandboxes.conftest import KINDS, make

pytestmark = pytest.mark.asyncio(loop_scope="module")

MB = 1 << 20


def pattern(size: int) -> Iterator[bytes]:
    """Yield bytes in which no two pieces are the same."""
    for number in range(0, size, MB):
        yield hashlib.sha256(str(number).encode()).digest() * (MB // 32)


async def test_files_larger_than_one_frame_are_written_and_read_whole(sandbox: Sandbox) -> None:
    data = b"".join(pattern(33 * MB)) + b"end"
    await sandbox.write({"a/large": data, "small": "s", "empty": b""})
    assert await sandbox.read("a/large", limit=len(data)) == data
    assert await sandbox.read("small") == b"s"
    assert await sandbox.list("a") == ["large"]
    with pytest.raises(ValueError, match="the limit is"):
        await sandbox.read("a/large", limit=len(data) - 1)
    await sandbox.write({"a/large": "now small"})
    assert await sandbox.read("a/large") == b"now small"


@dataclass(frozen=True)
class Source:
    """A large file on this machine, of that many megabytes."""

    path: Path
    megabytes: int
    sha256: str


@contextmanager
def source_of(megabytes: int, folder: Path) -> Iterator[Source]:
    """Create a file in which no two pieces are the same; it exists until the block ends."""
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


async def test_a_large_file_is_streamed_out_and_in_with_bounded_memory(sandbox: Sandbox, tmp_path: Path) -> None:
    with source_of(64, tmp_path) as source:
        await a_file_goes_in_and_out(sandbox, source, tmp_path / "back")
    with pytest.raises(ValueError, match="the limit is"):
        await sandbox.get("in/large", tmp_path / "refused", limit=64 * MB - 1)
    assert names_in(tmp_path) == []


SPARE_MB = 96
"""A container's memory besides that for its files: it would be killed if its server held more than a few pieces."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.docker) for kind in KINDS[2:])])
async def test_a_gigabyte_is_streamed_out_and_in_with_little_spare_memory(
    kind: str, gigabyte: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_mb = gigabyte.megabytes + 1
    sizes = {"unsafe": {"memory_mb": 128}, "bubblewrap": {"memory_mb": 128, "disk_mb": disk_mb}}
    container = {"memory_mb": SPARE_MB, "disk_mb": disk_mb}
    monkeypatch.setattr(settings, "FOLDERS", 1)
    async with make(kind, **sizes.get(kind, container)).open(1) as sandboxes, sandboxes.lease() as sandbox:
        await a_file_goes_in_and_out(sandbox, gigabyte, tmp_path / "back")


async def a_file_goes_in_and_out(sandbox: Sandbox, source: Source, back: Path) -> None:
    """Check that the file arrives whole both ways while this process holds only a few pieces of it at a time."""
    await sandbox.write({"small": bytes(17 * MB)})  # Load everything that a transfer needs first.
    await sandbox.exec("rm small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen: list[int] = []
    try:
        await sandbox.put(source.path, "in/large", timeout_s=300)
        assert (await sandbox.exec("sha256sum in/large", timeout_s=100)).stdout.startswith(f"{source.sha256} ")
        await sandbox.get("in/large", back, limit=source.megabytes * MB, timeout_s=300, progress=seen.append)
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


async def test_an_interrupted_copy_of_a_large_file_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    with (tmp_path / "source").open("wb") as file:
        file.truncate(64 * MB)
    copying = asyncio.create_task(sandbox.put(tmp_path / "source", "in"))
    while not (await sandbox.exec("ls -A")).stdout:
        assert not copying.done()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert await sandbox.list() == []
    await sandbox.write({"large": bytes(40 * MB)})
    reading = asyncio.create_task(sandbox.read("large", limit=40 * MB))
    await asyncio.sleep(0)
    reading.cancel()
    assert await sandbox.read("large", limit=40 * MB) == bytes(40 * MB)


async def test_a_large_file_follows_no_link_and_replaces_no_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("echo safe > real; ln -s real link; mkdir folder; mkdir outer; ln -s outer out")
    with pytest.raises(UnusablePath):
        await sandbox.write({"folder": bytes(17 * MB)})
    with pytest.raises(UnusablePath):
        await sandbox.write({"out/f": bytes(17 * MB)})
    with pytest.raises(ValueError, match="'link' is a link"):
        await sandbox.write({"link": bytes(17 * MB)})
    assert await sandbox.read("real") == b"safe\n"
    assert await sandbox.list("outer") == await sandbox.list("folder") == []


async def test_a_folder_is_packed_and_unpacked_as_one_archive(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write({"d/a/b.txt": "bé", "d/run": "#!/bin/sh\necho ran", "d/empty": ""})
    await sandbox.exec(
        "chmod 755 d/run; ln -s a/b.txt d/link; mkfifo d/pipe; mkdir d/none; touch \"$(printf 'd/\\377')\""
    )
    packed = await sandbox.archive("d")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert sorted(tar.getnames(), key=ascii) == sorted(
            ["a", "a/b.txt", "empty", "link", "none", "run", "\udcff"], key=ascii
        )
    await sandbox.unpack(packed, "copy")
    assert (await sandbox.exec("copy/run; cat copy/link; readlink copy/link")).stdout == "ran\nbéa/b.txt\n"
    assert await sandbox.list("copy/none") == []
    assert await sandbox.archive("d", tmp_path / "here/d.tar") == b""
    assert (tmp_path / "here/d.tar").read_bytes() == packed
    await sandbox.unpack(tmp_path / "here/d.tar", "again")
    assert await sandbox.list("again") == await sandbox.list("copy")
    await sandbox.exec("chmod 640 copy/run; ln copy/run copy/same; touch -d @5.5 copy/run; chmod 0 copy/empty")
    await sandbox.unpack(await sandbox.archive("copy"), "exact")
    shown = await sandbox.exec(
        "stat -c '%a %.1Y' exact/run; stat -c %a exact/empty; test exact/run -ef exact/same && echo one"
    )
    assert shown.stdout == "640 5.5\n0\none\n"
    one = await sandbox.archive("d/a/b.txt")
    await sandbox.unpack(one)
    assert await sandbox.read("b.txt") == "bé".encode()


async def test_compressed_and_large_archives_are_unpacked(sandbox: Sandbox, tmp_path: Path) -> None:
    for mode in ("w:gz", "w:xz", "w"):
        with tarfile.open(tmp_path / "t.tar", mode) as tar:
            member = tarfile.TarInfo("large")
            member.size = 20 * MB
            tar.addfile(member, io.BytesIO(bytes(20 * MB)))
        await sandbox.unpack(tmp_path / "t.tar", "x")
        assert (await sandbox.exec("wc -c < x/large")).stdout == f"{20 * MB}\n"


async def test_an_archive_over_its_limit_is_refused_and_nothing_is_written(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write({"large": bytes(MB)})
    with pytest.raises(ValueError, match="limit"):
        await sandbox.archive(".", limit=MB)
    with pytest.raises(ValueError, match="limit"):
        await sandbox.archive(".", tmp_path / "t.tar", limit=MB)
    assert names_in(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        await sandbox.archive("none")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "in/link/out"])
async def test_no_name_in_an_archive_leads_out_of_the_folder(sandbox: Sandbox, name: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in ("in/first", name):
            tar.addfile(tarfile.TarInfo(path), io.BytesIO())
    await sandbox.exec("mkdir -p outer t/in; ln -s ../../outer t/in/link")
    with pytest.raises(ValueError, match=r"outside|Not a directory"):
        await sandbox.unpack(packed.getvalue(), "t")
    assert await sandbox.list("t/in") == ["first", "link"]
    assert await sandbox.list("outer") == []


async def test_data_that_is_not_an_archive_is_refused(sandbox: Sandbox) -> None:
    for data in (b"", b"no archive", bytes(range(256)) * 100):
        with pytest.raises(ValueError, match="not a tar archive"):
            await sandbox.unpack(data)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        pipe = tarfile.TarInfo("pipe")
        pipe.type = tarfile.FIFOTYPE
        tar.addfile(pipe)
    with pytest.raises(ValueError, match="not a file, folder or link"):
        await sandbox.unpack(packed.getvalue())


async def test_file_calls_raise_documented_errors_whatever_code_does_to_its_files(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir d closed; echo x > closed/f; echo x > f; ln -s f link; ln -s loop loop; mkfifo pipe")
    await sandbox.exec("cp /bin/sleep busy; echo x > secret; chmod 0 secret closed")
    for path in ("d", "link", "loop", "pipe", "f/g", ".", "/", "../x", "n" * 300, "\0", "link/x"):
        for call in (
            sandbox.read(path),
            sandbox.get(path + "/", "unused") if path in ("loop", "f/g") else sandbox.read(path),
        ):
            with pytest.raises((ValueError, FileNotFoundError)):
                await call
    for path in ("d", "pipe", "f/g", ".", "../x", "n" * 300, "loop/x"):
        with pytest.raises(ValueError):  # noqa: PT011  # Each has its own text.
            await sandbox.write({path: "x"})
    for path in ("f", "loop", "../x", "f/g"):
        with pytest.raises(ValueError):  # noqa: PT011  # Each has its own text.
            await sandbox.list(path)
    async with sandbox.start(["./busy", "60"]):
        with suppress(UnusablePath):  # A new file of that name may replace it.
            await sandbox.write({"busy": "x"})
    if (await sandbox.exec("cat secret")).exit_code:  # Root may read it.
        for call in (sandbox.read("secret"), sandbox.read("closed/f")):
            with pytest.raises(ValueError, match="Permission"):
                await call
    assert await sandbox.read("f") == b"x\n"
