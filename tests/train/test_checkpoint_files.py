"""Files on disk are complete or absent, whenever the process that writes them dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentgym.files import replace_folder
from agentgym.train.checkpoint import check_step, has_checkpoints, last_checkpoint, write_checkpoint, write_step
from agentgym.train.policy.adapter_io import write_adapter
from agentgym.types.weights import Adapter

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}


def whole(folder: Path) -> list[int]:
    """Return the complete steps."""
    return [step for step in range(100) if (folder / f"step-{step:06}").exists() and read(folder, step)]


def read(folder: Path, step: int) -> dict[str, bytes]:
    """Check a step and return the content of its files."""
    check_step(folder / f"step-{step:06}")
    return {path.name: path.read_bytes() for path in (folder / f"step-{step:06}").iterdir() if path.suffix == ".pt"}


def test_a_process_killed_at_any_moment_of_a_write_leaves_the_step_whole_or_absent(tmp_path: Path) -> None:
    write_step(tmp_path, 1, {"state.pt": b"step 1" * 100})
    outcomes = []
    for moment in range(100):
        done = subprocess.run(
            [sys.executable, HERE / "write_script.py", tmp_path, "2", str(moment)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert read(tmp_path, 1)["state.pt"] == b"step 1" * 100
        there = (tmp_path / "step-000002").exists()
        assert not there or read(tmp_path, 2)["state.pt"] == b"step 2" * 100
        outcomes.append(there)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(outcomes) > 5
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # leftovers are gone


@pytest.mark.parametrize("how", ["exchange", pytest.param("renames", marks=pytest.mark.slow)])
def test_a_process_killed_while_it_writes_a_step_again_leaves_the_old_or_the_new_one(tmp_path: Path, how: str) -> None:
    found = []
    for moment in range(100):
        write_step(tmp_path, 2, {"state.pt": b"old" * 100})
        done = subprocess.run(
            [sys.executable, HERE / "write_script.py", tmp_path, "2", str(moment), "new", how],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        if how == "exchange":  # at every moment, not only after a cleanup by another process
            assert (tmp_path / "step-000002").exists()
        replace_folder.sweep(tmp_path / "step-000002")  # as the next write and the next resume do
        found.append(read(tmp_path, 2)["state.pt"][:3])
        assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert set(found) == {b"old", b"new"}


@pytest.mark.parametrize("renames", [False, True])
def test_replacing_an_adapter_leaves_one_and_no_hidden_folder(
    tmp_path: Path, renames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if renames:
        monkeypatch.setattr(replace_folder, "_exchange", lambda *_: False)
    left = [tmp_path / ".adapter-ab12cd34", tmp_path / ".adapter-ab12cd35-old", tmp_path / ".adapter-of-a-user"]
    for folder in left:
        folder.mkdir()
        (folder / "held").write_text(folder.name)
    replace_folder.sweep(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "held").read_text() == ".adapter-ab12cd35-old"  # it was moved out, not replaced
    adapter = Adapter(config={"r": 1}, tensors={"a": torch.zeros(2)})
    write_adapter(adapter, tmp_path / "adapter")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".adapter-of-a-user", "adapter"]
    assert not (tmp_path / "adapter" / "held").exists()


def test_the_last_checkpoints_are_kept_and_later_ones_removed_after_a_rewind(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step, {"said": step}, keep=3)
    assert whole(tmp_path) == [20, 30, 40]
    write_checkpoint(tmp_path, 30, {"said": "again"}, keep=2)
    assert whole(tmp_path) == [20, 30]
    assert last_checkpoint(tmp_path).state == {"said": "again"}


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        write_checkpoint(tmp_path, 1, {}, keep=0)
    assert not has_checkpoints(tmp_path)


def truncate(path: Path) -> None:
    content = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(content[:-10])


def flip(path: Path) -> None:
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)


def lose(path: Path) -> None:
    (path / "state.pt").unlink()


def half_a_manifest(path: Path) -> None:
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest[: len(manifest) // 2])


def another_manifest(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps(["step", 2]))


def empty_manifest(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps({"step": 2, "files": {}}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, r"state\.pt has \d+ bytes, expected \d+"),
        (flip, r"state\.pt .* checksum differs"),
        (lose, r"state\.pt cannot be read"),
        (half_a_manifest, r"manifest\.json cannot be read"),
        (another_manifest, r"manifest\.json cannot be read"),
        (empty_manifest, r"manifest\.json does not list state\.pt"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step, {"said": step}, keep=2)
    damage(tmp_path / "step-000002")
    with pytest.warns(UserWarning, match=f"step-000002 is not used: .*{said}"):
        found = last_checkpoint(tmp_path)
    assert (found.step, found.state) == (1, {"said": 1})


def test_without_a_complete_checkpoint_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume: no complete checkpoint in .*checked 0"):
        last_checkpoint(tmp_path / "nowhere")
    write_checkpoint(tmp_path, 1, {}, keep=1)
    truncate(tmp_path / "step-000001")
    with (
        pytest.warns(UserWarning, match="is not used"),
        pytest.raises(ValueError, match=r"no complete checkpoint .*checked 1"),
    ):
        last_checkpoint(tmp_path)
