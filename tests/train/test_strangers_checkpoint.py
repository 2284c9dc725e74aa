"""Checkpoints of strangers: reading one runs no code and reads no file outside it."""

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from agentgym.files.foreign.opening import UnreadableFileError
from agentgym.train.checkpoint import check_step, last_checkpoint, sum_of
from agentgym.train.snapshot import METADATA, PartsReader, _alone, _saved, _Unpickler


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-000001"
    with _alone():
        save(
            {"weights/a": torch.zeros(3), "weights/b": torch.zeros(2, 5).bfloat16()}, checkpoint_id=folder, no_dist=True
        )
    return folder


class Evil:
    """Runs a command when unpickled."""

    def __init__(self, marked: Path) -> None:
        self.marked = marked

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marked),)


def test_checkpoints_written_by_torch_are_read(checkpoint: Path) -> None:
    assert _saved(checkpoint) == {"weights/a": torch.Size([3]), "weights/b": torch.Size([2, 5])}


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_checkpoints_of_every_python_are_read(module: bytes) -> None:
    name = type(Path()).__module__.encode()
    pickled = pickle.dumps(Path("a"), protocol=0).replace(b"c" + name + b"\n", b"c" + module + b"\n")
    assert b"c" + module + b"\n" in pickled
    assert _Unpickler(io.BytesIO(pickled)).load() == Path("a")


def test_reading_tensor_locations_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / METADATA).write_bytes(pickle.dumps(Evil(tmp_path / "marked")))
    with pytest.raises(
        UnreadableFileError, match=r"\.metadata: .* names posix\.mkdir, which isn't allowed in a checkpoint"
    ):
        PartsReader(checkpoint).read_metadata()
    assert not (tmp_path / "marked").exists()


def test_entries_that_are_not_tensors_are_not_unpickled(checkpoint: Path) -> None:
    found = PartsReader(checkpoint).read_metadata()
    found.state_dict_metadata["weights/a"] = BytesStorageMetadata()
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(UnreadableFileError, match=r"BytesStorageMetadata|'weights/a' is not a tensor"):
        PartsReader(checkpoint).read_metadata()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({}), pickle.dumps(Metadata({}))[:-9]])
def test_a_damaged_metadata_file_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / METADATA).write_bytes(content)
    with pytest.raises(UnreadableFileError, match=r"\.metadata: expected the locations of the checkpoint's tensors"):
        PartsReader(checkpoint).read_metadata()


@pytest.mark.parametrize("to", ["../secret", "pipe", "/dev/zero"])
def test_tensors_are_read_only_from_inside_the_checkpoint(checkpoint: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    os.mkfifo(checkpoint / "pipe")
    found = PartsReader(checkpoint).read_metadata()
    index = MetadataIndex("weights/a", torch.Size([0]))
    where = next(iter(found.storage_data.values()))
    found.storage_data[index] = type(where)(to, 0, 1)
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(UnreadableFileError, match=r"leads out of|is a pipe"):
        PartsReader(checkpoint).read_metadata()


@pytest.mark.parametrize("name", ["pipe", "../secret", "/dev/zero", "down/pipe"])
def test_a_manifest_with_invalid_file_names_is_not_a_checkpoint(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-000001"
    (folder / "down").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "down/pipe")
    said = f'{{"files": {{"{name}": {{"bytes": 6, "sha256": "a"}}, "state.pt": {{"bytes": 0, "sha256": ""}}}}}}'
    (folder / "manifest.json").write_text(said)
    with pytest.raises(ValueError, match=f"^{name} cannot be read"):
        check_step(folder)


def written(folder: Path, **said: Any) -> None:
    """Write the manifest of a step's folder as if all its files were right; `said` are additional files."""
    files = {path.name: path for path in folder.iterdir() if path.suffix == ".pt"}
    sums = {name: dict(zip(("bytes", "sha256"), sum_of(path), strict=True)) for name, path in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"files": sums | said}))


@pytest.mark.parametrize("name", ["\x1b]0;title\x07", "a\0b", "\u202eb", "x" * 300])
def test_a_name_in_a_manifest_cannot_control_the_terminal(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    torch.save({}, folder / "state.pt")
    written(folder, **{name: {"bytes": 1, "sha256": ""}})
    with (
        pytest.warns(UserWarning, match="is not used") as said,
        pytest.raises(ValueError, match="no complete checkpoint"),
    ):
        last_checkpoint(tmp_path)
    assert str(said[0].message).isprintable()


def test_a_file_with_the_wrong_size_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    torch.save({}, folder / "state.pt")
    written(folder)
    with (folder / "state.pt").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"^state\.pt has 1099511627776 bytes, expected \d+$"):
        check_step(folder)


@pytest.mark.parametrize("size", [float("inf"), "many", None, [1]])
def test_an_invalid_size_is_named(tmp_path: Path, size: Any) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    written(folder, **{"state.pt": {"bytes": size, "sha256": ""}})
    with pytest.raises(ValueError, match=r"^the step's manifest\.json cannot be read"):
        check_step(folder)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("state", ["a list", "not a zip", "a pickle", "a truncated zip"])
def test_a_foreign_state_is_not_used_and_runs_no_code(tmp_path: Path, state: str) -> None:
    folder, marked = tmp_path / "step-000001", tmp_path / "marked"
    folder.mkdir()
    torch.save([1, 2], folder / "state.pt")
    whole = (folder / "state.pt").read_bytes()
    content = {
        "a list": whole,
        "not a zip": b"x" * 99,
        "a pickle": pickle.dumps(Evil(marked)),
        "a truncated zip": whole[:-50],
    }
    (folder / "state.pt").write_bytes(content[state])
    written(folder)
    with pytest.warns(UserWarning, match=r"its state\.pt "), pytest.raises(ValueError, match="no complete checkpoint"):
        last_checkpoint(tmp_path)
    assert not marked.exists()
