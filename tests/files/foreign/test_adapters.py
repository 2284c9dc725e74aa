"""Adapters from strangers: their tensors are checked before they are loaded, and links lead nowhere else."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.engines.adapter_files import read_adapter
from agentgym.engines.sglang.model_info import write_adapter
from agentgym.evals.opening import adapter_folder, base_of
from agentgym.files.foreign.adapter import CONFIG, TENSORS, adapter_tensors
from agentgym.files.foreign.opening import UnreadableFileError
from agentgym.types.weights import Adapter
from tests.files.foreign.commands import Worker, worker, wrong_with

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("cache")) as made:
        yield made


def adapter(folder: Path, **config: Any) -> Path:
    kept = {"r": 2, "lora_alpha": 2, "base_model_name_or_path": "tiny", "peft_type": "LORA"} | config
    write_adapter(Adapter(config=kept, tensors={A: np.ones((2, 8), np.float32)}), folder)
    return folder


def rewrite(folder: Path, header: Any, rest: int = 64) -> None:
    """Write a tensor file with this header, followed by a hole of this many bytes."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (folder / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / TENSORS, 8 + len(text) + rest)


def tensor(size: int, **fields: Any) -> dict[str, Any]:
    return {A: {"dtype": "F32", "shape": [2, size // 8], "data_offsets": [0, size]} | fields}


BROKEN: dict[str, tuple[Any, int, str]] = {
    "holes": (tensor(1 << 35), 1 << 35, r"has 34,359,\d+,\d+ bytes, but takes only .* on disk, so most of it is holes"),
    "more than the file": (tensor(1 << 35), 64, "its header declares 34,359,738,368 bytes of tensors, but 64 follow"),
    "less than the file": (tensor(32), 64, "its header declares 32 bytes of tensors, but 64 follow"),
    "a list": ([1], 64, "its header is not a valid safetensors header"),
    "no JSON": ("{", 64, "its header is not a valid safetensors header"),
    "deep": ("[" * 100_000, 64, "its header is not a valid safetensors header"),
    "an offset of text": (
        tensor(64, data_offsets=["a", "b"]),
        64,
        "lengths and offsets must be integers of at least 0, got 'a'",
    ),
    "no shape": ({A: {"data_offsets": [0, 64]}}, 64, "its header is not a valid safetensors header"),
    "a negative shape": (tensor(64, shape=[-1]), 64, "lengths and offsets must be integers of at least 0, got -1"),
    "backwards": (tensor(64, data_offsets=[64, 0]), 64, "a tensor ends before it begins"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_tensors_that_do_not_match_their_header_are_refused(broken: str, tmp_path: Path, commands: Worker) -> None:
    header, rest, told = BROKEN[broken]
    folder = adapter(tmp_path / "adapter")
    rewrite(folder, header, rest)
    with pytest.raises(ValueError, match=f"cannot be read: UnreadableFileError: .*{TENSORS}:? .*{told}"):
        read_adapter(folder)
    (found,) = commands.run(["merge", str(folder), str(tmp_path / "out")])
    assert (wrong_with(found), found["code"]) == ([], 1)
    assert found["error"].startswith(f"agentgym: {folder / TENSORS}")


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    (folder / TENSORS).write_bytes(b"\xff" * 64)
    with pytest.raises(UnreadableFileError, match="does not start like a safetensors file"):
        adapter_tensors(folder)


@pytest.mark.parametrize("config", [{"r": 10**9}, {"rank_pattern": {"q_proj": 3}}, {"r": 3}])
def test_a_rank_that_no_tensor_has_allocates_no_matrices(
    config: dict[str, Any], tmp_path: Path, commands: Worker
) -> None:
    folder = adapter(tmp_path / "adapter", **config)
    (found,) = commands.run(["merge", str(folder), str(tmp_path / "out")])
    assert (wrong_with(found), found["code"]) == ([], 1)
    assert (
        "but it must be at most the tensors' rank, 2, and at most 16,384; correct r or rank_pattern" in found["error"]
    )


def test_a_pickle_in_place_of_tensors_is_not_loaded(tmp_path: Path, commands: Worker) -> None:
    folder = adapter(tmp_path / "adapter")
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    (found,) = commands.run(["merge", str(folder), str(tmp_path / "out")])
    assert (wrong_with(found), found["code"]) == ([], 1)
    assert f"No such file or directory: '{folder / TENSORS}'" in found["error"]


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_a_link_out_of_an_adapter_is_refused_except_in_the_hubs_cache(name: str, tmp_path: Path) -> None:
    snapshot = adapter(tmp_path / "models--one/snapshots/0123")
    (tmp_path / "models--one/blobs").mkdir()
    (snapshot / name).rename(tmp_path / "models--one/blobs/456")
    (snapshot / name).symlink_to("../../blobs/456")
    (tmp_path / "linked").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "linked"):
        assert list(read_adapter(folder).tensors) == [A]
        assert base_of(folder) == "tiny"
    (snapshot / name).unlink()
    (tmp_path / "models--one").rename(tmp_path / "elsewhere")
    own = adapter(tmp_path / "own")
    (own / name).unlink()
    (own / name).symlink_to(tmp_path / "elsewhere/blobs/456")
    with pytest.raises(ValueError, match="is a link that leads out of"):
        read_adapter(own)


def test_running_out_of_memory_gives_an_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_file(path: Path) -> Any:
        raise MemoryError

    monkeypatch.setattr("safetensors.torch.load_file", load_file)
    with pytest.raises(ValueError, match="cannot be read: MemoryError"):
        read_adapter(adapter(tmp_path / "adapter"))


@pytest.mark.parametrize("base", ["/" + "n" * 300, "n" * 5000, "a\0b", [1]], ids=lambda base: f"{base!r:.10}")
def test_an_adapter_with_an_invalid_base_model_gives_an_error_message(
    base: Any, tmp_path: Path, commands: Worker
) -> None:
    folder = adapter(tmp_path / "adapter", base_model_name_or_path=base)
    out = str(tmp_path / "out")
    rollout, merged = commands.run(
        ["eval", "chase", "--model", str(folder), "--n", "1", "--output-dir", out], ["merge", str(folder), out]
    )
    assert (wrong_with(rollout), wrong_with(merged)) == ([], [])
    assert (rollout["code"], merged["code"]) == (1, 1)


def test_a_model_name_too_long_for_a_file_is_not_an_adapter() -> None:
    assert adapter_folder(Path("n" * 300)) is None
