"""Snapshots of trained weights, and folders of adapters and whole models in the formats of PEFT and transformers."""

import json
import tempfile
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentgym.files.replace_folder import written_whole
from agentgym.train.fingerprint import base_fingerprint
from agentgym.train.policy.model import PolicyModel
from agentgym.types.weights import Adapter, ModelWeights


@torch.no_grad()
def export_adapter(policy: PolicyModel) -> Adapter:
    """Return a CPU snapshot of the adapter, unaffected by further training.

    Every rank must call it, and every rank gets a snapshot.
    """
    from peft import get_peft_model_state_dict

    model = cast("Any", policy.model)
    trained = {name: whole(tensor) for name, tensor in model.named_parameters() if tensor.requires_grad}
    tensors = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
    return Adapter(config=_config(policy), tensors=tensors)


@torch.no_grad()
def export_weights(policy: PolicyModel, dtype: torch.dtype, *, keep: bool = True) -> ModelWeights | None:
    """Return a CPU copy of the trained weights, converted to `dtype`. Every rank must call it.

    A rank that passes `keep=False` only helps to gather the weights, one at a time. It stores none, and gets None.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = {}
    for name, weight in policy.causal.named_parameters():
        if not weight.requires_grad:
            continue
        rounded = weight.to(dtype)
        if keep:
            tensors[name] = whole(rounded)
        elif isinstance(rounded, DTensor):
            rounded.full_tensor()
    if not keep:
        return None
    return ModelWeights(tensors=tensors, files=revert_weight_conversion(policy.causal, dict(tensors)))


def _config(policy: PolicyModel) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json."""
    config: dict[str, Any] = _plain(cast("Any", policy.model).peft_config["default"].to_dict())
    return config | {"target_modules": layer_names(policy.causal), "inference_mode": True}


def layer_names(causal: Any) -> list[str]:
    """Return the shortest suffixes of layer names that match every layer with an adapter and no other linear layer.

    They replace PEFT's list of targets in the adapter's config. Engines look for the last part of a layer's name, but
    PEFT's list contains full names if the model is small.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, Any] = dict(causal.named_modules())
    wrapped = [name for name, part in layers.items() if isinstance(part, BaseTunerLayer)]
    adapted = [name for name in wrapped if not list(layers[name].get_base_layer().children())]
    others = [
        name
        for name, part in layers.items()
        if isinstance(part, nn.Linear) and ".base_layer" not in name and ".lora_" not in name
    ]
    found = set()
    for name in adapted:
        parts = name.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        found.add(next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), name))
    return sorted(found)


def write_adapter(adapter: Adapter, path: Path, files: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write an adapter as PEFT's two files, and write the texts in `files`, by file name, next to them.

    The folder at `path` is complete or doesn't exist.
    """
    from safetensors.torch import save_file

    with written_whole(path) as fresh:
        save_file(dict(adapter.tensors), fresh / "adapter_model.safetensors", metadata={"format": "pt"})
        (fresh / "adapter_config.json").write_text(json.dumps(dict(adapter.config), indent=2, sort_keys=True) + "\n")
        _write_texts(files, fresh)


def write_merged(
    base: Path | str, adapter: Adapter | Path, path: Path, files: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Merge the adapter into the base model, and write the result as a plain model folder.

    The folder is complete or doesn't exist. The sums are computed in float32 and stored in the base model's data
    type. The tokenizer is copied if the base has one.

    Args:
        base: Folder or Hugging Face name of the base model.
        adapter: A snapshot, or a folder in PEFT's format.
        path: Folder to write.
        files: Texts of additional files in the folder, by file name.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with written_whole(path) as fresh, tempfile.TemporaryDirectory() as made:
        held = Path(made) / "adapter"
        if isinstance(adapter, Adapter):
            write_adapter(adapter, held)
        else:
            held = adapter
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        own = model.dtype
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT uses the old name
            merged = PeftModel.from_pretrained(model.float(), held).merge_and_unload(safe_merge=True)
        merged.to(own).save_pretrained(fresh)
        _copy_tokenizer(base, fresh)
        _write_texts(files, fresh)


@torch.no_grad()
def write_model(
    base: Path | str,
    weights: Mapping[str, Tensor],
    path: Path,
    *,
    dtype: torch.dtype,
    fingerprint: str,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the base model, with the trained weights in place of its own, as a plain model folder.

    The folder is complete or doesn't exist. The tokenizer is copied if the base has one.

    Args:
        base: Folder or Hugging Face name of the base model.
        weights: The new weights by their names in the model.
        path: Folder to write.
        dtype: Data type of the written weights.
        fingerprint: Expected fingerprint of the base (see `base_fingerprint`).
        files: Texts of additional files in the folder, by file name.

    Raises:
        ValueError: If the base has another fingerprint.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if base_fingerprint(model) != fingerprint:
        raise ValueError(f"base: {base} is not the model that was trained; pass that model")
    own = dict(model.named_parameters())
    for name, weight in weights.items():
        own[name].copy_(weight)
    with written_whole(path) as fresh:
        model.save_pretrained(fresh)
        _copy_tokenizer(base, fresh)
        _write_texts(files, fresh)


def _write_texts(files: Mapping[str, str], path: Path) -> None:
    for name, text in files.items():
        (path / name).write_text(text)


def _copy_tokenizer(base: Path | str, path: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError):
        return  # a model without a tokenizer, such as a test model
    tokenizer.save_pretrained(path)


def whole(tensor: Tensor) -> Tensor:
    """Return a CPU copy of a tensor. Every rank must call it, because a sharded tensor is gathered first."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def _plain(value: Any) -> Any:
    """Convert a value of PEFT's config, which may contain sets and enums, to types that JSON has."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
