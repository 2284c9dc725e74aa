"""Checkpoints of strangers: reading one runs no code, and reads no file outside of it."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from agentgym.foreign_files.opening import UnreadableFileError
from agentgym.train.checkpoint import read_step
from agentgym.train.snapshot import METADATA, PartsReader, _alone, _saved


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-000001"
    with _alone():
        save(
            {"weights/a": torch.zeros(3), "weights/b": torch.zeros(2, 5).bfloat16()}, checkpoint_id=folder, no_dist=True
        )
    return folder


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, marked: Path) -> None:
        self.marked = marked

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marked),)


def test_what_torch_writes_is_read(checkpoint: Path) -> None:
    assert _saved(checkpoint) == {"weights/a": torch.Size([3]), "weights/b": torch.Size([2, 5])}


def test_reading_where_the_tensors_are_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / METADATA).write_bytes(pickle.dumps(Evil(tmp_path / "marked")))
    with pytest.raises(
        UnreadableFileError, match=r"\.metadata: .* names posix\.mkdir, which is no part of a checkpoint"
    ):
        PartsReader(checkpoint).read_metadata()
    assert not (tmp_path / "marked").exists()


def test_what_is_no_tensor_is_not_unpickled(checkpoint: Path) -> None:
    found = PartsReader(checkpoint).read_metadata()
    found.state_dict_metadata["weights/a"] = BytesStorageMetadata()
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(UnreadableFileError, match=r"BytesStorageMetadata|'weights/a' is no tensor"):
        PartsReader(checkpoint).read_metadata()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({}), pickle.dumps(Metadata({}))[:-9]])
def test_a_damaged_one_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / METADATA).write_bytes(content)
    with pytest.raises(UnreadableFileError, match=r"\.metadata: it does not say where the tensors are"):
        PartsReader(checkpoint).read_metadata()


@pytest.mark.parametrize("to", ["../secret", "pipe", "/dev/zero"])
def test_tensors_are_read_from_the_checkpoint_alone(checkpoint: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    os.mkfifo(checkpoint / "pipe")
    found = PartsReader(checkpoint).read_metadata()
    index = MetadataIndex("weights/a", torch.Size([0]))
    where = next(iter(found.storage_data.values()))
    found.storage_data[index] = type(where)(to, 0, 1)
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(UnreadableFileError, match=r"leads out of|it is a pipe"):
        PartsReader(checkpoint).read_metadata()


@pytest.mark.parametrize("name", ["pipe", "../secret", "/dev/zero", "down/pipe"])
def test_a_manifest_that_names_odd_files_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-000001"
    (folder / "down").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "down/pipe")
    said = f'{{"files": {{"{name}": {{"bytes": 6, "sha256": "a"}}, "state.pt": {{"bytes": 0, "sha256": ""}}}}}}'
    (folder / "manifest.json").write_text(said)
    with pytest.raises(ValueError, match=f"^{name} cannot be read"):
        read_step(folder)
