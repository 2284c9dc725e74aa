"""A cheap hash that identifies the base model of an adapter."""

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
"""Settings of a model's config that go into its hash, because they change its computation. Models that differ only in
other settings have the same hash.
"""
VALUES = 16
"""Number of evenly spaced values that are read from each weight."""


@torch.no_grad()
def base_fingerprint(model: Any) -> str:
    """Return a hash of the model's settings and weights, the same for weights in float32 and in bfloat16.

    Only some settings and VALUES numbers of each weight are read, so models that differ in very few numbers may have
    the same hash.
    """
    config = model.config.get_text_config()
    settings = {name: getattr(config, name, None) for name in SETTINGS}
    found = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        positions = torch.linspace(0, weight.numel() - 1, min(VALUES, weight.numel()), dtype=torch.float64).long()
        values = weight.detach().reshape(-1)[positions.to(weight.device)].to(torch.bfloat16).float()
        found.update(f"{name} {tuple(weight.shape)}".encode() + values.cpu().numpy().tobytes())
    return found.hexdigest()[:16]
