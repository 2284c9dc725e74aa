"""A file system without locks, and one that several machines share."""

import errno
import os
import platform
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentgym.files import file_systems
from agentgym.files.file_systems import shared_kind
from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE
from agentgym.store.writer import RolloutWriter
from tests.files.no_locks import CALLS
from tests.store.test_store import group, rollout

ROOT = Path(__file__).parents[2]


def held(folder: Path, code: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.files.no_locks", str(folder), str(code)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(platform.machine() not in CALLS, reason="the system call numbers of this machine are not known")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(errno.ENOSYS, id="Lustre without flock"),
        pytest.param(errno.ENOLCK, id="NFS without locks", marks=pytest.mark.slow),
    ],
)
def test_without_locks_one_process_writes_and_the_next_takes_over_after_a_kill(tmp_path: Path, code: int) -> None:
    with RolloutWriter(tmp_path) as writer:  # in write-ahead mode, as on the disk from which the folder was copied
        writer.add([group(rollout("first/0"))], step=0)
    first = held(tmp_path, code)
    assert first.stdout is not None
    assert first.stdout.readline() == "held, lost 0, stored 2\n"
    refused, _ = held(tmp_path, code).communicate()
    assert refused.startswith(f"output_dir, resume: {tmp_path} is in use by process {first.pid} on ")
    first.kill()
    _, warned = first.communicate()
    said = " ".join(warned.split())
    assert "is on a file system without locks: the file .lock is the lock" in said
    assert "is written without SQLite's write-ahead log" in said
    took_over, _ = held(tmp_path, code).communicate("")
    assert took_over == "held, lost 0, stored 3\n"
    assert not (tmp_path / ".lock").exists()


def test_a_store_on_a_network_file_system_has_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mode() -> str:
        with closing(sqlite3.connect(tmp_path / FILE)) as connection:
            return str(connection.execute("PRAGMA journal_mode").fetchone()[0])

    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0"))], step=0)
    assert mode() == "wal"
    monkeypatch.setattr(file_systems, "SHARED", {magic(tmp_path): "NFS"})
    assert shared_kind(tmp_path) == "NFS"
    with RolloutWriter(tmp_path, done=9) as writer, RolloutStore(tmp_path) as store:
        writer.add([group(rollout("b/0"))], step=0)
        writer.flush()
        assert sorted(found.rollout.rollout_id for found in store.find()) == ["a/0", "b/0"]
    assert mode() == "delete"  # the default mode, without a write-ahead log
    assert [f"{FILE} is on NFS" in message for message in caplog.messages] == [True]


def magic(folder: Path) -> int:
    """Return the file system's magic number, as `stat -f` prints it."""
    said = subprocess.run(["stat", "-f", "-c", "%t", str(folder)], capture_output=True, text=True, check=True)
    return int(said.stdout, 16)
