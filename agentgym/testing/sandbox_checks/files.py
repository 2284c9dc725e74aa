"""Checks of a sandbox's files: single ones, folders, archives and snapshots."""

import asyncio
import io
import os
import tarfile
import tempfile
from pathlib import Path

from agentgym.sandboxes.protocol import Sandbox
from agentgym.testing.sandbox_checks.claims import holds, raises, refuses, same

CONTENT = bytes(range(256)) * 64
MODE = "import os; oct(os.stat('f').st_mode & 0o777)"


async def write(sandbox: Sandbox) -> None:
    """Check that files are written completely, that missing folders are created, and that no path leads outside."""
    await sandbox.write({"a/b": CONTENT, "c": "é"})
    same("a file from the shell", (await sandbox.exec("cat c")).stdout, "é")
    same("the size of a file in a new folder", (await sandbox.exec("wc -c < a/b")).stdout.strip(), str(len(CONTENT)))
    await sandbox.write({"c": "new"})
    same("a file that is written again", (await sandbox.exec("cat c")).stdout, "new")
    await refuses("write outside", ValueError, sandbox.write({"../outside": "x"}))
    await refuses("write in place of a folder", ValueError, sandbox.write({"a": "x"}))


async def read(sandbox: Sandbox) -> None:
    """Check that files are read completely, that a missing one raises FileNotFoundError, and a large one ValueError."""
    await sandbox.exec("printf content > f; mkdir folder; ln -s /etc/passwd link")
    same("read", await sandbox.read("f"), b"content")
    await refuses("read over the limit", ValueError, sandbox.read("f", limit=3))
    await sandbox.write({"large": CONTENT * 200})
    same("read of 3 MB", await sandbox.read("large", limit=1 << 24), CONTENT * 200)
    await refuses("read of a missing file", FileNotFoundError, sandbox.read("nowhere"))
    for path in ("folder", "link", "../outside"):
        await refuses(f"read of {path!r}", ValueError, sandbox.read(path))


async def read_text(sandbox: Sandbox) -> None:
    """Check that files are read as UTF-8, and that other bytes raise ValueError."""
    await sandbox.exec("printf 'é' > f; printf '\\377' > latin")
    same("read_text", await sandbox.read_text("f"), "é")
    await refuses("read_text over the limit", ValueError, sandbox.read_text("f", limit=1))
    await refuses("read_text of a missing file", FileNotFoundError, sandbox.read_text("nowhere"))
    await refuses("read_text of bytes that are not UTF-8", ValueError, sandbox.read_text("latin"))


async def list_(sandbox: Sandbox) -> None:
    """Check that names are sorted, folders end with a slash, and a missing folder raises FileNotFoundError."""
    same("list of an empty folder", await sandbox.list(), [])
    await sandbox.exec("mkdir -p b/inner; touch c a")
    same("list", await sandbox.list(), ["a", "b/", "c"])
    same("list of a folder", await sandbox.list("b"), ["inner/"])
    await refuses("list of a missing folder", FileNotFoundError, sandbox.list("nowhere"))
    await refuses("list of a file", ValueError, sandbox.list("c"))
    await refuses("list outside", ValueError, sandbox.list(".."))


async def put(sandbox: Sandbox) -> None:
    """Check that a file or a folder of this machine is copied into the sandbox."""
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        folder = Path(name)
        (folder / "a").mkdir()
        (folder / "a/b").write_bytes(CONTENT)
        (folder / "run").write_text("#!/bin/sh\necho ran\n")
        (folder / "run").chmod(0o755)
        copied: list[int] = []
        await sandbox.put(folder, "there", progress=copied.append)
        same("a file of a folder that was put", await sandbox.read("there/a/b"), CONTENT)
        same("a program that was put", (await sandbox.exec(["there/run"])).stdout, "ran\n")
        holds("progress says how many bytes were copied", copied[-1:] == [len(CONTENT) + 19])
        await sandbox.put(folder / "a/b", "alone")
        same("a file that was put", await sandbox.read("alone"), CONTENT)
        await raises("put of a missing file", FileNotFoundError, sandbox.put(folder / "nowhere"))


async def get(sandbox: Sandbox) -> None:
    """Check that a file or a folder of the sandbox is copied to this machine, and that links are left out and named."""
    await sandbox.write({"there/a/b": CONTENT, "alone": "x"})
    await sandbox.exec("ln -s /etc/passwd there/link")
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        folder = Path(name)
        same("the links that get leaves out", [*await sandbox.get("there", folder / "here")], ["link"])
        same("a file that get copied", _content(folder / "here/a/b"), CONTENT)
        await sandbox.get("alone", folder / "alone")
        same("a single file that get copied", _content(folder / "alone"), b"x")
        await refuses("get over the limit", ValueError, sandbox.get("there", folder / "large", limit=3))
        holds("get over the limit writes nothing", not (folder / "large").exists())
        await refuses("get of a missing path", FileNotFoundError, sandbox.get("nowhere", folder / "nowhere"))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


async def archive(sandbox: Sandbox) -> None:
    """Check that a folder becomes one tar archive, in memory or in a file of this machine."""
    await sandbox.write({"a/b": CONTENT})
    same("the names in an archive", _names(await sandbox.archive("a")), ["b"])
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        target = Path(name, "it.tar")
        same("archive with a target", await sandbox.archive("a", target), b"")
        same("the names in the target", _names(_content(target)), ["b"])
    await refuses("archive over the limit", ValueError, sandbox.archive("a", limit=100))
    await refuses("archive of a missing path", FileNotFoundError, sandbox.archive("nowhere"))


def _names(packed: object) -> list[str]:
    if not isinstance(packed, bytes):
        raise AssertionError(f"an archive: expected bytes, got {packed!r:.300}")
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
            return sorted(member.name.removeprefix("./") for member in opened if member.isfile())
    except tarfile.TarError as error:
        raise AssertionError(f"an archive: expected a tar archive: {error}") from error


async def unpack(sandbox: Sandbox) -> None:
    """Check that a tar archive is unpacked into a folder, and that an archive with a path outside of it is rejected."""
    await sandbox.write({"a/b": CONTENT})
    packed = await sandbox.archive("a")
    await sandbox.unpack(packed, "copy")
    same("a file that was unpacked", await sandbox.read("copy/b"), CONTENT)
    await raises("unpack of data that is not an archive", ValueError, sandbox.unpack(b"text" * 1000))
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as made:
        made.addfile(tarfile.TarInfo("../outside"))
    await raises("unpack of a path outside the folder", ValueError, sandbox.unpack(outside.getvalue()))


async def snapshot(sandbox: Sandbox) -> None:
    """Check that the working folder is saved to a file of this machine, and that nothing over the limit is saved."""
    await sandbox.write({"a/b": CONTENT})
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        path = Path(name, "it.tar")
        await sandbox.snapshot(path)
        same("the names in a snapshot", _names(_content(path)), ["a/b"])
        await refuses("snapshot over the limit", ValueError, sandbox.snapshot(Path(name, "large.tar"), limit=100))
        same("the files that snapshot over the limit writes", await asyncio.to_thread(os.listdir, name), ["it.tar"])


async def restore(sandbox: Sandbox) -> None:
    """Check that a snapshot replaces the folder's content, and that an invalid file is rejected without changes."""
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        path, wrong = Path(name, "it.tar"), Path(name, "wrong.tar")
        await sandbox.exec("printf before > f; chmod 750 f")
        await sandbox.write({"there/large": CONTENT * 64})
        await sandbox.snapshot(path)
        await sandbox.write({"f": "after", "g": "x", "there/large": "after"})
        for content in (b"", b"text" * 1000, (_content(path) or b"")[:600]):
            await asyncio.to_thread(wrong.write_bytes, content)
            await raises(f"restore of a file that begins with {content[:4]!r}", ValueError, sandbox.restore(wrong))
            same("the files after it", await sandbox.list(), ["f", "g", "there/"])
        await sandbox.restore(path)
        same("the files of a snapshot", await sandbox.list(), ["f", "there/"])
        same("a large file of a snapshot", await sandbox.read("there/large", limit=1 << 24), CONTENT * 64)
        same("the content of a snapshot", await sandbox.read("f"), b"before")
        same("the mode of a snapshot's file", (await sandbox.python(MODE)).stdout, "'0o750'\n")
        await raises("restore of a missing file", FileNotFoundError, sandbox.restore(Path(name, "nowhere")))
