"""Engines load an adapter from the folder that a run wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.adapter_files import read_adapter
from agentgym.engines.sglang.model_info import write_adapter
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.types.completion import Sampling
from agentgym.types.weights import Adapter
from tests.engines.sglang.peer import Peer, sglang
from tests.engines.sglang.test_engine import over

MODEL = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase"
IDS = [1, 2, 3, 4]


def adapter_of(engine: TransformersEngine) -> Adapter:
    """Return an adapter of the first layer's queries that changes every log-probability."""
    weight = engine._opened().policy.model.model.layers[0].self_attn.q_proj.weight
    draw = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = torch.randn(2, weight.shape[1], generator=draw), torch.randn(weight.shape[0], 2, generator=draw)
    return Adapter(
        config={"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]},
        tensors={f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b},
    )


@pytest.mark.parametrize("kind", [str, Path])
async def test_the_local_engine_reads_a_saved_adapter_from_its_folder(kind: Any, tmp_path: Path) -> None:
    async with TransformersEngine(MODEL, TransformersConfig(slots=1, device="cpu")) as engine:
        adapter = adapter_of(engine)
        write_adapter(adapter, tmp_path / "adapter")
        base = await engine.score(IDS, sampling=Sampling())
        await engine.load_adapter(adapter, version=1)
        wanted = await engine.score(IDS, sampling=Sampling())
        await engine.load_adapter(None, version=2)
        await engine.load_adapter(kind(tmp_path / "adapter"), version=3)
        assert engine.version == 3
        found = await engine.score(IDS, sampling=Sampling())
    assert np.array_equal(found, wanted)
    assert not np.allclose(found, base)


async def test_an_invalid_adapter_or_folder_is_refused() -> None:
    async with over(Peer(sglang())) as engine:
        with pytest.raises(ValueError, match="adapter: 'nowhere' has no adapter_config"):
            await engine.load_adapter("nowhere", version=1)
        with pytest.raises(
            ValueError, match="adapter: must be an Adapter, the folder of a saved one, or None, got dict"
        ):
            await engine.load_adapter({}, version=1)  # type: ignore[arg-type]
        assert engine.version == 0


async def test_an_sglang_engine_sends_the_folders_adapter(tmp_path: Path) -> None:
    loaded: list[Any] = []

    async def load(payload: Any) -> None:
        loaded.append(payload["config_dict"])

    write_adapter(Adapter(config={"r": 1}, tensors={"a": torch.zeros(1)}), tmp_path / "adapter")
    async with over(Peer(sglang(load_lora_adapter_from_tensors=load))) as engine:
        await engine.load_adapter(tmp_path / "adapter", version=1)
        assert engine.version == 1
    assert loaded == [{"r": 1}]


def test_a_folder_without_an_adapter_is_refused_and_a_run_folder_names_its_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no adapter_config\.json and no adapter_model\.safetensors$"):
        read_adapter(tmp_path)
    write_adapter(Adapter(config={"r": 1}, tensors={"a": np.zeros(1)}), tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"and no adapter_model\.safetensors; '.*/adapter' has both files$"):
        read_adapter(tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(ValueError, match=r"cannot be read: UnreadableFileError: .*start like a safetensors file"):
        read_adapter(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read: UnreadableFileError"):
        read_adapter(tmp_path / "adapter")


async def test_the_engine_loads_its_model_to_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentgym.engines.transformers.model import device_of

    assert TransformersConfig().device == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of("auto") == device_of("cuda") == torch.device("cuda", 3)
    assert (device_of("cpu"), device_of("cuda:1")) == (torch.device("cpu"), torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^device: torch has no device 'gpu'; use auto, cpu, cuda or cuda:N"):
        device_of("gpu")
