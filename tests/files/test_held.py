"""Folders that are moved, removed, replaced or locked by another process while a process writes to them."""

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from agentgym.files.folder_lock import LOCK, FolderInUse, LockedFolder, hold_folder
from agentgym.files.held import place_now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def locked_elsewhere(folder: Path) -> bool:
    """Return whether another process would find the folder's lock taken."""
    with (folder / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_folder_that_stays_in_place_has_not_changed(path: Path) -> None:
    with hold_folder(path) as held:
        assert held.follow() is None
        assert held.path == path


def test_a_folder_is_found_after_it_was_moved_even_twice(path: Path) -> None:
    with hold_folder(path) as held:
        for name in ("one", "two"):
            now = path.with_name(name)
            held.path.rename(now)
            change = held.follow()
            assert change is not None
            assert (change.path, change.lost, held.path) == (now, False, now)
            assert place_now(path) == now
        path.mkdir()  # another run takes the old name
        with hold_folder(path):
            assert held.follow() is None
        assert locked_elsewhere(now)
    assert not (now / LOCK).exists()


def test_a_removed_folder_is_recreated_and_locked(path: Path) -> None:
    with hold_folder(path) as held:
        shutil.rmtree(path)
        change = held.follow()
        assert change is not None
        assert (change.path, change.lost) == (path, True)
        assert "was removed while it was written to" in change.said
        assert locked_elsewhere(path)
        assert held.follow() is None
    assert not (path / LOCK).exists()


def test_if_another_run_took_a_removed_folder_a_new_one_is_created_next_to_it(path: Path) -> None:
    with hold_folder(path) as held:
        shutil.rmtree(path)
        path.mkdir()
        with hold_folder(path):
            change = held.follow()
            assert change is not None
            assert (change.path, change.lost) == (path.with_name("run-2"), True)
            assert f"another folder is at its path: {change.path} was created next to it" in change.said
            assert locked_elsewhere(change.path)


@pytest.mark.parametrize("how", ["removed", "restored from a copy"])
def test_a_removed_lock_is_acquired_again(path: Path, how: str) -> None:
    with hold_folder(path) as held:
        (path / LOCK).unlink()
        if how != "removed":
            (path / LOCK).write_text("1\n")
        assert held.follow() is None
        assert locked_elsewhere(path)
    assert not (path / LOCK).exists()


def test_a_folder_whose_lock_another_process_holds_is_left_to_it(path: Path) -> None:
    with hold_folder(path) as held:
        (path / LOCK).unlink()
        with hold_folder(path):
            with pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}.*this process ends"):
                held.follow()
            change = held.leave()
            assert change.path == path.with_name("run-2")
        assert (path / LOCK).exists() is False
    assert change.path.is_dir()


def open_below(folder: Path) -> list[str]:
    """Return the files and folders below this folder, removed ones too, that this process has open."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # Another thread has closed it in the meantime.
            links.append(str(descriptor.readlink()))
    return [link for link in links if link.startswith(f"{folder}/")]


def test_folder_handles_are_closed(path: Path) -> None:
    held = LockedFolder(path)
    shutil.rmtree(path)
    held.follow()
    assert open_below(path.parent) != []
    held.close()
    assert open_below(path.parent) == []


def in_the_way(path: Path) -> None:
    """Put a file in place of the parent folder, so that no folder can be created there."""
    shutil.rmtree(path.parent)
    path.parent.write_text("a file")


@pytest.mark.parametrize("how", ["follow", "leave"])
def test_a_folder_that_cannot_be_created_stays_held_until_it_can(tmp_path: Path, how: str) -> None:
    (path := tmp_path / "above" / "run").mkdir(parents=True)
    with hold_folder(path) as held:
        in_the_way(path)
        for _ in range(2):
            with pytest.raises(NotADirectoryError), (tmp_path / "victim").open("w"):
                getattr(held, how)()
        path.parent.unlink()
        change = getattr(held, how)()
        assert (change.path, change.lost) == (path, True)


def test_only_one_of_several_threads_recreates_a_removed_folder(path: Path) -> None:
    with hold_folder(path) as held, ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            shutil.rmtree(held.path)
            changes = [made.result() for made in [threads.submit(held.follow) for _ in range(8)]]
            assert [change.path for change in changes if change is not None] == [path]
    assert open_below(path.parent) == []
    assert not path.with_name("run-2").exists()


def test_a_lock_that_cannot_be_recreated_is_logged_and_ends_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold_folder(path) as held:
        (path / LOCK).unlink()
        (path / LOCK).mkdir()
        assert held.follow() is None
        assert f"{path / LOCK} could not be written" in caplog.text
        (path / LOCK).rmdir()
        assert held.follow() is None
        assert locked_elsewhere(path)
