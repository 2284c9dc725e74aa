"""Which base model an adapter belongs to, told by a hash that is cheap to make."""

import hashlib
import json
from typing import Any

import torch

SETTINGS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "sliding_window",
    "tie_word_embeddings",
)
"""Of a model's config: what changes its computation. Others, such as the version that wrote it, may differ."""
VALUES = 16
"""Looked at in each weight, evenly spaced."""


@torch.no_grad()
def base_fingerprint(model: Any) -> str:
    """A hash of the model's computation: equal for equal weights in float32 and in bfloat16, different for others.

    It reads some settings and VALUES numbers of each weight, so models that differ in very few numbers may share one.
    """
    config = model.config.get_text_config()
    settings = {name: getattr(config, name, None) for name in SETTINGS}
    found = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        places = torch.linspace(0, weight.numel() - 1, min(VALUES, weight.numel()), dtype=torch.float64).long()
        values = weight.detach().reshape(-1)[places.to(weight.device)].to(torch.bfloat16).float()
        found.update(f"{name} {tuple(weight.shape)}".encode() + values.cpu().numpy().tobytes())
    return found.hexdigest()[:16]
