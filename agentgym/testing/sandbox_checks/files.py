"""Checks of a box's files: single ones, folders, archives and snapshots."""

import asyncio
import io
import os
import tarfile
import tempfile
from pathlib import Path

from agentgym.sandboxes.protocol import Box
from agentgym.testing.sandbox_checks.claims import holds, raises, refuses, same

CONTENT = bytes(range(256)) * 64
MODE = "import os; oct(os.stat('f').st_mode & 0o777)"


async def write(box: Box) -> None:
    """Files are written whole below folders that are made for them, and nowhere else."""
    await box.write({"a/b": CONTENT, "c": "é"})
    same("a file from the shell", (await box.exec("cat c")).stdout, "é")
    same("the size of a file in a new folder", (await box.exec("wc -c < a/b")).stdout.strip(), str(len(CONTENT)))
    await box.write({"c": "new"})
    same("a file that is written again", (await box.exec("cat c")).stdout, "new")
    await refuses("write outside", ValueError, box.write({"../outside": "x"}))
    await refuses("write in the place of a folder", ValueError, box.write({"a": "x"}))


async def read(box: Box) -> None:
    """Files are read whole; a missing one is FileNotFoundError, one over the limit ValueError."""
    await box.exec("printf content > f; mkdir folder; ln -s /etc/passwd link")
    same("read", await box.read("f"), b"content")
    await refuses("read over the limit", ValueError, box.read("f", limit=3))
    await box.write({"large": CONTENT * 200})
    same("read of 3 MB", await box.read("large", limit=1 << 24), CONTENT * 200)
    await refuses("read of a missing file", FileNotFoundError, box.read("nowhere"))
    for path in ("folder", "link", "../outside"):
        await refuses(f"read of {path!r}", ValueError, box.read(path))


async def read_text(box: Box) -> None:
    """Files are read as UTF-8; what is none is a ValueError."""
    await box.exec("printf 'é' > f; printf '\\377' > latin")
    same("read_text", await box.read_text("f"), "é")
    await refuses("read_text over the limit", ValueError, box.read_text("f", limit=1))
    await refuses("read_text of a missing file", FileNotFoundError, box.read_text("nowhere"))
    await refuses("read_text of what is not UTF-8", ValueError, box.read_text("latin"))


async def list_(box: Box) -> None:
    """Names are sorted, those of folders with a slash; a missing folder is FileNotFoundError."""
    same("list of an empty folder", await box.list(), [])
    await box.exec("mkdir -p b/inner; touch c a")
    same("list", await box.list(), ["a", "b/", "c"])
    same("list of a folder", await box.list("b"), ["inner/"])
    await refuses("list of a missing folder", FileNotFoundError, box.list("nowhere"))
    await refuses("list of a file", ValueError, box.list("c"))
    await refuses("list outside", ValueError, box.list(".."))


async def put(box: Box) -> None:
    """A file or a folder of this machine is copied into the box."""
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        folder = Path(name)
        (folder / "a").mkdir()
        (folder / "a/b").write_bytes(CONTENT)
        (folder / "run").write_text("#!/bin/sh\necho ran\n")
        (folder / "run").chmod(0o755)
        copied: list[int] = []
        await box.put(folder, "there", progress=copied.append)
        same("a file of a folder that was put", await box.read("there/a/b"), CONTENT)
        same("a program that was put", (await box.exec(["there/run"])).stdout, "ran\n")
        holds("progress says how many bytes were copied", copied[-1:] == [len(CONTENT) + 19])
        await box.put(folder / "a/b", "alone")
        same("a file that was put", await box.read("alone"), CONTENT)
        await raises("put of a missing file", FileNotFoundError, box.put(folder / "nowhere"))


async def get(box: Box) -> None:
    """A file or a folder of the box is copied to this machine; links are left out and named."""
    await box.write({"there/a/b": CONTENT, "alone": "x"})
    await box.exec("ln -s /etc/passwd there/link")
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        folder = Path(name)
        same("what get leaves out", [*await box.get("there", folder / "here")], ["link"])
        same("a file that get brought", _content(folder / "here/a/b"), CONTENT)
        await box.get("alone", folder / "alone")
        same("a single file that get brought", _content(folder / "alone"), b"x")
        await refuses("get over the limit", ValueError, box.get("there", folder / "large", limit=3))
        holds("get over the limit writes nothing", not (folder / "large").exists())
        await refuses("get of what is not there", FileNotFoundError, box.get("nowhere", folder / "nowhere"))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


async def archive(box: Box) -> None:
    """A folder becomes one tar archive, in memory or in a file of this machine."""
    await box.write({"a/b": CONTENT})
    same("the names in an archive", _names(await box.archive("a")), ["b"])
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        target = Path(name, "it.tar")
        same("archive with a target", await box.archive("a", target), b"")
        same("the names in the target", _names(_content(target)), ["b"])
    await refuses("archive over the limit", ValueError, box.archive("a", limit=100))
    await refuses("archive of what is not there", FileNotFoundError, box.archive("nowhere"))


def _names(packed: object) -> list[str]:
    if not isinstance(packed, bytes):
        raise AssertionError(f"an archive: bytes are promised, got {packed!r:.300}")
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
            return sorted(member.name.removeprefix("./") for member in opened if member.isfile())
    except tarfile.TarError as error:
        raise AssertionError(f"an archive: a tar archive is promised: {error}") from error


async def unpack(box: Box) -> None:
    """What is in a tar archive is made below a folder, and nowhere else."""
    await box.write({"a/b": CONTENT})
    packed = await box.archive("a")
    await box.unpack(packed, "copy")
    same("a file that was unpacked", await box.read("copy/b"), CONTENT)
    await raises("unpack of what is no archive", ValueError, box.unpack(b"text" * 1000))
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as made:
        made.addfile(tarfile.TarInfo("../outside"))
    await raises("unpack of a name that leads out", ValueError, box.unpack(outside.getvalue()))


async def snapshot(box: Box) -> None:
    """The working folder goes to a file of this machine; nothing is written over the limit."""
    await box.write({"a/b": CONTENT})
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        path = Path(name, "it.tar")
        await box.snapshot(path)
        same("the names in a snapshot", _names(_content(path)), ["a/b"])
        await refuses("snapshot over the limit", ValueError, box.snapshot(Path(name, "large.tar"), limit=100))
        same("the files that snapshot over the limit writes", await asyncio.to_thread(os.listdir, name), ["it.tar"])


async def restore(box: Box) -> None:
    """A snapshot takes the place of the folder's content; a file that is none is refused, and the folder stays."""
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        path, wrong = Path(name, "it.tar"), Path(name, "wrong.tar")
        await box.exec("printf before > f; chmod 750 f")
        await box.write({"there/large": CONTENT * 64})
        await box.snapshot(path)
        await box.write({"f": "after", "g": "x", "there/large": "after"})
        for content in (b"", b"text" * 1000, (_content(path) or b"")[:600]):
            await asyncio.to_thread(wrong.write_bytes, content)
            await raises(f"restore of a file that begins with {content[:4]!r}", ValueError, box.restore(wrong))
            same("the files after it", await box.list(), ["f", "g", "there/"])
        await box.restore(path)
        same("the files of a snapshot", await box.list(), ["f", "there/"])
        same("a large file of a snapshot", await box.read("there/large", limit=1 << 24), CONTENT * 64)
        same("the content of a snapshot", await box.read("f"), b"before")
        same("the mode of a snapshot's file", (await box.python(MODE)).stdout, "'0o750'\n")
        await raises("restore of a missing file", FileNotFoundError, box.restore(Path(name, "nowhere")))
