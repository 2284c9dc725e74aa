"""Disks that refuse writes."""

import errno
import gc
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from agentgym.errors import AgentGymError
from agentgym.files.disk import CODES, Refusals, disk_trouble, is_gone, write_whole
from agentgym.train.snapshot import _write_part
from tests.files.limits import files_up_to


@pytest.mark.parametrize("code", sorted(CODES))
def test_each_disk_error_is_recognized(code: int) -> None:
    assert disk_trouble(OSError(code, os.strerror(code))) == os.strerror(code)
    wrapped = AgentGymError(f"rank 0: OSError: [Errno {code}] {os.strerror(code)}")  # as another process reports it
    assert disk_trouble(wrapped) == os.strerror(code)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), ValueError("28"), KeyError("a"), TimeoutError()])
def test_other_errors_are_not_disk_errors(error: Exception) -> None:
    assert disk_trouble(error) is None


# From Python 3.13 on, torch's writer reports the full disk a second time, when it is collected.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*NoCloseWriter:pytest.PytestUnraisableExceptionWarning")
def test_disk_errors_of_torch_safetensors_and_sqlite_are_recognized(tmp_path: Path) -> None:
    large = np.zeros(100_000, np.float32)
    found = []
    with closing(sqlite3.connect(tmp_path / "store", isolation_level=None)) as store, files_up_to(10_000):
        store.execute("CREATE TABLE t (a)")
        for write in (
            lambda: save_file({"a": large}, tmp_path / "a.safetensors"),
            lambda: _write_part(tmp_path / "parts", 0, {"a": torch.from_numpy(large)}),
            lambda: store.execute("INSERT INTO t VALUES (?)", (large.tobytes(),)),
        ):
            with pytest.raises(Exception, match=r".") as caught:
                write()
            found.append(disk_trouble(caught.value))
            del caught
    gc.collect()
    assert all(found), found


def test_a_file_that_does_not_fit_is_unchanged_and_the_error_names_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "before")
    with files_up_to(100), pytest.raises(OSError, match=r"^\[Errno 27\] .*summary.json'$"):
        write_whole(path, "x" * 1000)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_writes_are_counted_each_time_and_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    said: list[str] = []
    refusals = Refusals(said.append)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(5):
        assert not refusals.attempt("a checkpoint", full, then="it is tried again")
        clock[0] += 20
    assert refusals.attempt("a checkpoint", lambda: None, then="it is tried again")
    assert refusals.counts == {"a checkpoint": 5}
    assert said == ["a checkpoint could not be written (No space left on device); it is tried again."] * 2
    with pytest.raises(ZeroDivisionError):
        refusals.attempt("a checkpoint", lambda: 1 / 0, then="")


def test_a_path_that_cannot_be_checked_does_not_count_as_gone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    found = {name: is_gone(tmp_path / name) for name in ("file", "none", "file/below", "loop", "x" * 300)}
    assert found == {"file": False, "none": True, "file/below": True, "loop": False, "x" * 300: False}
