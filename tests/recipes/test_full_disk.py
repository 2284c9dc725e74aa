"""A full disk: the run ends with one line that says what is saved and how to resume when there is space."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.test_stop import SMALL, start, steps_kept

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a separate 400 KB disk."""
    made = tmp_path / "disk"
    made.mkdir()
    if os.geteuid() != 0 or mounted(made, "size=400k").returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield made
    subprocess.run(["umount", str(made)], check=True)


def mounted(folder: Path, options: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
    )


def test_a_run_on_a_full_disk_says_so_and_can_be_resumed_when_there_is_space(disk: Path) -> None:
    flags = [*SMALL, "--max-steps", "2", "--save-every", "1", "--output-dir", str(disk / "run")]
    full = start(sys.executable, "-m", "recipes.chase_grpo", *flags)
    assert full.returncode == 1
    line = full.stderr.splitlines()[-1]
    unwritten = f"{disk}/run/adapter could not be written to disk. "
    assert line.startswith(f"chase_grpo: output_dir: {unwritten}")
    assert "2 steps are finished" in line
    assert "a checkpoint could not be written (No space left on device)" in full.stderr
    assert "Traceback" not in full.stderr
    assert mounted(disk, "remount,size=40m").returncode == 0
    done = start(*shlex.split(line.partition("to resume: ")[2]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    assert steps_kept(disk / "run")[-1:] == ["step-000002"]


def test_a_disk_without_room_for_the_rollouts_gives_one_line(disk: Path) -> None:
    (disk / "other").write_bytes(bytes(380_000))
    full = start(
        sys.executable, "-m", "recipes.chase_grpo", *SMALL, "--max-steps", "1", "--output-dir", str(disk / "run")
    )
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1].startswith(f"chase_grpo: {disk}/run/rollouts.sqlite: ")
    assert "Traceback" not in full.stderr
