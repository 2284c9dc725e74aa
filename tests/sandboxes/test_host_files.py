"""Files copied between this machine and a sandbox: complete, bounded, and without following links."""

import asyncio
import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentgym.sandboxes import host_files
from agentgym.sandboxes.fake.files import tar_of
from agentgym.sandboxes.fake.sandbox import FakeSandbox
from agentgym.sandboxes.host_files import HostSource, Spool, new_file, store_tree
from agentgym.sandboxes.protocol import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


def store_files(target: Path, files: Mapping[str, bytes]) -> None:
    with Spool(target) as spool:
        for path, content in files.items():
            spool.add(path, content)
        store_tree(target, spool)


def names_in(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=ascii)


async def test_a_folder_is_copied_in_and_out_whole(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/data").write_bytes(bytes(range(256)) * 999)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    await sandbox.put(source, "copy")
    assert (await sandbox.exec("copy/run.sh; stat -c %a copy/a/b/data")).stdout == "ran\n644\n"
    assert await sandbox.get("copy", tmp_path / "back") == []
    assert (tmp_path / "back/a/b/data").read_bytes() == bytes(range(256)) * 999
    assert (tmp_path / "back/run.sh").stat().st_mode & 0o777 == 0o755


async def test_a_file_larger_than_one_frame_does_not_affect_other_files(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"x" * (5 << 20))
    for name in ("b", "c"):
        (source / name).write_text(name)
    await sandbox.put(source, "copy")
    assert sorted(await sandbox.list("copy")) == ["a", "b", "c"]
    assert await sandbox.read("copy/c") == b"c"


@pytest.mark.parametrize(
    ("sizes", "grouped"),
    [
        ([15, 1, 1], [[15], [1, 1]]),
        ([1, 15, 1], [[1], [15], [1]]),
        ([1, 1, 15], [[1, 1], [15]]),
        ([15, 15, 1], [[15], [15], [1]]),
        ([10] * 8, [[10] * 4, [10] * 4]),
        ([0, 15, 0], [[0], [15], [0]]),
        ([1, 1, 1, 1, 1, 1], [[1, 1, 1, 1, 1], [1]]),
        ([], []),
    ],
)
async def test_files_are_batched_whole_and_a_large_file_is_alone(sizes: list[int], grouped: list[list[int]]) -> None:
    files = [HostSource(str(index), Path("s"), size, executable=False) for index, size in enumerate(sizes)]
    groups = list(host_files.batches(files, most=5, large=10))
    assert [file for group in groups for file in group] == files
    assert [[file.size for file in group] for group in groups] == grouped


async def test_a_folders_files_are_copied_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/d", "b/c", "a", "c/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [file.path for file in host_files.find_files(tmp_path, "x")] == ["x/a", "x/b/c", "x/b/d", "x/c/a"]


async def test_one_file_is_copied_in_and_out(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("text")
    await sandbox.put(tmp_path / "f")
    await sandbox.put(tmp_path / "f", "a/g")
    assert await sandbox.read("f") == await sandbox.read("a/g") == b"text"
    await sandbox.get("a/g", tmp_path / "h")
    assert (tmp_path / "h").read_text() == "text"
    with pytest.raises(FileNotFoundError):
        await sandbox.get("none", tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        await sandbox.put(tmp_path / "none")


async def test_links_on_this_machine_are_refused_and_nothing_is_written(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/a").write_text("x")
    (tmp_path / "s/link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"^source: '.*/s/link' is a link, a pipe or a device; "):
        await sandbox.put(tmp_path / "s")
    with pytest.raises(ValueError, match="link"):
        await sandbox.put(tmp_path / "s/link")
    assert await sandbox.list() == []


async def test_links_and_pipes_in_the_sandbox_are_left_out_and_named(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec(
        "mkdir d; ln -s /etc d/etc; ln -s /etc/passwd d/p; mkfifo d/pipe; echo x > d/f; echo x > $(printf 'd/\\377')"
    )
    assert sorted(await sandbox.get("d", tmp_path / "d")) == ["etc", "p", "pipe"]
    assert names_in(tmp_path / "d") == sorted(["\udcff", "f"], key=ascii)


UNOPENED = """
import os, socket, stat
os.mkdir('d')
open('d/f', 'w').write('x')
socket.socket(socket.AF_UNIX).bind('d/socket')
try: os.mknod('d/device', stat.S_IFCHR | 0o666, os.makedev(0, 0))
except PermissionError: print('no device')
"""


async def test_devices_and_sockets_that_cannot_be_opened_are_left_out_too(sandbox: Sandbox, tmp_path: Path) -> None:
    made = await sandbox.python(UNOPENED)
    left_out = ["socket"] if made.stdout else ["device", "socket"]
    assert sorted(await sandbox.get("d", tmp_path / "d")) == left_out
    assert names_in(tmp_path / "d") == ["f"]
    for name in left_out:
        with pytest.raises(ValueError, match="is not a file"):
            await sandbox.read(f"d/{name}")


async def test_a_link_in_the_way_is_not_followed_on_this_machine(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write({"d/f": "x", "d/g/h": "x"})
    (tmp_path / "outside").mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "one/f").symlink_to(tmp_path / "outside/f")
    with pytest.raises(FileExistsError):
        await sandbox.get("d", tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/g").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExistsError):
        await sandbox.get("d", tmp_path / "two")
    assert names_in(tmp_path / "outside") == []


async def test_size_limits_hold_in_both_directions(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sandbox.exec("mkdir d; for i in 1 2 3; do head -c 1000 /dev/zero > d/$i; done")
    with pytest.raises(ValueError, match="limit"):
        await sandbox.get("d", tmp_path / "d", limit=2500)
    assert names_in(tmp_path) == []
    await sandbox.get("d", tmp_path / "d", limit=3000)
    monkeypatch.setattr(host_files, "MAX_FILES", 2)
    with pytest.raises(ValueError, match=r"^source: .* contains over 2 files; "):
        await sandbox.put(tmp_path / "d", "e")
    assert await sandbox.list() == ["d/"]


async def test_copying_has_a_time_limit(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(ValueError, match="timeout_s"):
        await sandbox.put(tmp_path / "f", timeout_s=0)
    with pytest.raises(TimeoutError):
        await sandbox.put(tmp_path / "f", timeout_s=1e-9)
    with pytest.raises(TimeoutError):
        await sandbox.get(".", tmp_path / "g", timeout_s=1e-9)
    assert (await sandbox.python("1")).ok


async def test_no_name_leads_out_of_the_target(tmp_path: Path) -> None:
    for path in ("../x", "a/../../x"):
        with pytest.raises(ValueError, match="leads out"):
            store_files(tmp_path / "t", {path: b"x"})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "path", ["/etc/x", "//x", "a//b", "a/", "./a", "a/./b", "../x", "a/../../x", "..", ".", "/", "a\0b"]
)
async def test_a_path_with_invalid_parts_is_refused_and_nothing_is_written(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leads out of"):
        store_files(tmp_path / "target", {"good": b"x", path: b"x"})
    assert names_in(tmp_path) == []


async def test_files_can_be_stored_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    store_files(Path(), {"a/b": b"1"})
    store_files(Path(".."), {"c": b"2"})
    assert ((tmp_path / "below/a/b").read_bytes(), (tmp_path / "c").read_bytes()) == (b"1", b"2")
    with pytest.raises(ValueError, match=r"^target: '\.' is a folder; "):
        store_files(Path(), {"": b"1"})


@pytest.mark.parametrize(
    ("target", "path", "what", "where"),
    [
        ("link", "", "a link", "link"),
        ("folder", "link", "a link", "folder/link"),
        ("folder", "", "a folder", "folder"),
        ("pipe", "", "a pipe, a socket or a device", "pipe"),
        ("link", "f", "a link or a file", "link"),
        ("file", "f", "a link or a file", "file"),
        ("folder", "link/f", "a link or a file", "folder/link"),
        ("file/f", "", "a link or a file", "file"),
        ("file/f/g", "", "a link or a file", "file/f"),
        ("dangling/f", "", "a link or a file", "dangling"),
    ],
)
async def test_what_is_in_the_way_of_a_file_is_named(
    target: str, path: str, what: str, where: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder/link").symlink_to("../folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError) as failed:
        store_files(tmp_path / target, {path: b"x"})
    said = f"target: {what} is in the way of {str(tmp_path / where)!r}; remove it or give another path"
    assert str(failed.value) == said


@pytest.mark.parametrize(
    ("target", "path", "number"),
    [
        ("n" * 300, "", errno.ENAMETOOLONG),
        ("folder", "n" * 300, errno.ENAMETOOLONG),
        ("folder", "n" * 300 + "/f", errno.ENAMETOOLONG),
        ("/proc/none", "", errno.ENOENT),
        ("/proc/none", "f", errno.ENOENT),
        ("/dev/full", "", errno.ENOSPC),
    ],
)
async def test_a_file_that_cannot_be_stored_is_named_with_the_reason(
    target: str, path: str, number: int, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as failed:
        store_files(tmp_path / target, {path: b"x"})
    assert failed.value.errno == number
    assert str(tmp_path / target / path).startswith(failed.value.filename)
    assert failed.value.filename.startswith(str(tmp_path / target))


@pytest.fixture
def small_files() -> Iterator[bytes]:
    """Let this process write only files of 32 MiB, and yield more bytes than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, before[1]))
    yield bytes((32 << 20) + 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_large_copy_that_the_disk_does_not_accept_names_where_it_was_written(
    tmp_path: Path, small_files: bytes
) -> None:
    with pytest.raises(OSError, match=f"File too large: '{tmp_path}'$"), Spool(tmp_path / "folder/file") as spool:
        spool.write(small_files)
    target = tmp_path / "archive.tar"
    with pytest.raises(OSError, match=f"File too large: '{target}'$"), new_file(target, "target") as file:
        file.write(small_files)
    assert names_in(tmp_path) == []


async def test_a_path_with_a_null_character_is_named_in_every_call(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write({"f": "x"})
    path = str(tmp_path / "a\0b")
    calls: dict[str, list[Coroutine[Any, Any, object]]] = {
        "source": [sandbox.put(path), sandbox.put(Path(path))],
        "target": [sandbox.get("f", path), sandbox.get("f", f"{path}/c"), sandbox.archive("f", path)],
        "path": [sandbox.snapshot(path), sandbox.restore(path)],
        "archive": [sandbox.unpack(path), sandbox.unpack(Path(path))],
    }
    for field, refused in calls.items():
        for call in refused:
            with pytest.raises(ValueError, match=f"^{field}: must be a path without null characters, got '/"):
                await call
    assert names_in(tmp_path) == []


async def test_a_file_call_that_gets_a_folder_names_its_argument(sandbox: Sandbox, tmp_path: Path) -> None:
    both: list[Sandbox] = [sandbox, FakeSandbox()]
    for each in both:
        await each.write({"f": "x"})
        with pytest.raises(IsADirectoryError, match=r"^target: .* is a folder; give the path of a file$"):
            await each.archive("f", tmp_path)
        with pytest.raises(IsADirectoryError, match=r"^path: .* is a folder; give the path of a file$"):
            await each.snapshot(tmp_path)


@pytest.fixture(params=["nr_inodes=1", "ro"])
def closed_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk that accepts no file, because it has room for none or is read-only."""
    command = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


async def test_a_copy_to_a_disk_that_accepts_no_file_names_no_temporary_file(closed_disk: Path) -> None:
    refused = "No space left on device|Read-only file system"
    with pytest.raises(OSError, match=f"({refused}): '{closed_disk}'$"), Spool(closed_disk / "file") as spool:
        spool.write(bytes(host_files.IN_MEMORY + 1))
    target = closed_disk / "archive.tar"
    with pytest.raises(OSError, match=f"({refused}): '{target}'$"), new_file(target, "target"):
        pass


async def test_a_file_call_whose_target_is_below_a_file_names_its_argument(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    both: list[Sandbox] = [sandbox, FakeSandbox()]
    for each in both:
        await each.write({"f": "x"})
        with pytest.raises(FileExistsError, match=r"^target: a link or a file is in the way of '.*/file'"):
            await each.archive("f", tmp_path / "file/f")
        with pytest.raises(FileExistsError, match=r"^path: a link or a file is in the way of '.*/file/a'"):
            await each.snapshot(tmp_path / "file/a/f")
    assert (tmp_path / "file").read_text() == "mine"


async def test_a_file_in_a_sandbox_is_no_folder_for_other_files(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    both: list[Sandbox] = [sandbox, FakeSandbox()]
    for each in both:
        await each.write({"f": "x", "d/e/f": "y"})
        for below in ("f/g", "f/g/h"):
            for call in (each.write({below: "1"}), each.put(tmp_path / "one", below), each.read(below)):
                with pytest.raises(NotADirectoryError):
                    await call
            with pytest.raises(NotADirectoryError):
                await each.unpack(tar_of({"x": b"1"}, 1 << 20), below)
        with pytest.raises(NotADirectoryError):
            await each.write({"g": "1", "g/h": "2"})
        with pytest.raises(IsADirectoryError):
            await each.write({"i/j": "1", "i": "2"})
        for folder in ("d", "d/e"):
            for call in (each.write({folder: "1"}), each.put(tmp_path / "one", folder)):
                with pytest.raises(IsADirectoryError):
                    await call
        assert [await each.read_text(path) for path in ("f", "d/e/f")] == ["x", "y"]
    with pytest.raises(NotADirectoryError):
        FakeSandbox(files={"g": "1", "g/h": "2"})


@pytest.mark.parametrize(
    ("source", "target", "what"),
    [
        ("f", "folder", "a folder"),
        ("f", "link", "a link"),
        ("f", "file/f", "a link or a file"),
        ("d", "link", "a link or a file"),
        ("d", "file", "a link or a file"),
    ],
)
async def test_nothing_that_is_in_the_way_of_a_copied_file_is_replaced(
    sandbox: Sandbox, tmp_path: Path, source: str, target: str, what: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("file")
    both: list[Sandbox] = [sandbox, FakeSandbox()]
    for each in both:
        await each.write({"f": "x", "d/f": "x"})
        with pytest.raises(FileExistsError, match=f"^target: {what} is in the way of "):
            await each.get(source, tmp_path / target)
    assert (names_in(tmp_path), (tmp_path / "file").read_text()) == (["file", "folder", "link"], "mine")


async def test_the_root_of_this_machine_is_refused_as_the_target_of_a_file(sandbox: Sandbox) -> None:
    await sandbox.write({"f.txt": "x"})
    with pytest.raises(ValueError, match=r"^target: '/' is a folder; give the path of a file"):
        await sandbox.get("f.txt", "/")


async def test_an_empty_path_is_the_working_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    both: list[Sandbox] = [sandbox, FakeSandbox()]
    for each in both:
        here = tmp_path / type(each).__name__
        await each.write({"a": "1", "b/c": "2"})
        await each.get("", here)
        assert [(here / path).read_text() for path in ("a", "b/c")] == ["1", "2"]
        await each.write({"a": "new", "b/c": "new"})
        await each.put(here, "")
        assert [await each.read_text(path) for path in ("a", "b/c")] == ["1", "2"]
        await each.write({"a": "new", "b/c": "new"})
        await each.unpack(tar_of({"a": b"1", "b/c": b"2"}, 1 << 20), "")
        assert [await each.read_text(path) for path in ("a", "b/c")] == ["1", "2"]


async def test_a_deep_folder_of_this_machine_is_copied(sandbox: Sandbox, tmp_path: Path) -> None:
    inner = tmp_path
    try:
        for _ in range(1200):
            inner /= "d"
            inner.mkdir()
        (inner / "f").write_text("x")
        both: list[Sandbox] = [sandbox, FakeSandbox()]
        for each in both:
            await each.put(tmp_path, "copy")
            assert await each.read_text("copy/" + "d/" * 1200 + "f") == "x"
    finally:
        await asyncio.to_thread(subprocess.run, ["rm", "-rf", str(tmp_path / "d")])


KILLED = """
import os, signal, sys
from pathlib import Path
from agentgym.sandboxes.host_files import new_file
with new_file(Path(sys.argv[1]), "target") as file:
    file.write(bytes(1 << 20))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_file_has_no_name_until_it_is_whole_and_a_killed_client_leaves_none(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"this file system doesn't support unnamed files: {error}")
    target = tmp_path / "target"
    target.write_bytes(b"before")
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED, str(target)])
    assert killed.returncode == -signal.SIGKILL
    assert names_in(tmp_path) == ["target"]
    assert target.read_bytes() == b"before"
    with new_file(target, "target") as file:
        file.write(b"after")
        assert names_in(tmp_path) == ["target"]
    assert (target.read_bytes(), names_in(tmp_path)) == (b"after", ["target"])
