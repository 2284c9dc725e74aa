"""Random tiny models of many transformers families, and samples to train them on."""

from typing import Any

import numpy as np
import torch

from agentgym.types.sample import Sample

VOCAB = 64

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "sliding_window": 5,
    "attention_chunk_size": 5,
    "rotary_dim": 8,
    "lru_width": 32,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_expand": 2,
    "state_size": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_mamba_heads": 2,
}
"""Small values for the families' settings; each family uses those that it has."""

LAYER_SETTINGS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")


ROPE = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 8}
"""Scaled rotary positions that start to differ at the ninth token."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "llama": {},
    "llama4_text": {},
    "mistral": {},
    "ministral3": {},
    "mixtral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "gemma3_text": {},
    "vaultgemma": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "gpt_oss": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "olmo_hybrid": {},
    "flex_olmo": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "smollm3": {},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "granite": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoehybrid": {},
    "granitemoeshared": {},
    "seed_oss": {},
    "starcoder2": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "afmoe": {},
    "helium": {},
    "hy_v3": {},
    "jais2": {},
    "internlm3": {},
    "laguna": {},
    "mellum": {},
    "minimax": {},
    "minimax_m2": {},
    "mimo_v2_flash": {},
    "nanochat": {},
    "nemotron_h": {},
    "kimi_linear": {},
    "bailing_hybrid": {},
    "inkling_text": {},
    "lfm2": {},
    "lfm3": {},
    "jamba": {},
    "zamba2": {},
    "falcon_mamba": {},
    "mamba": {},
    "rwkv": {},
    "xlstm": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "gptj": {},
    "gpt-sw3": {},
    "codegen": {},
    "opt": {},
    "biogpt": {},
    "bloom": {},
    "mpt": {},
    "xglm": {},
    "stablelm": {},
    "persimmon": {},
    "diffllama": {},
    "doge": {},
    "cwm": {},
    "solar_open": {},
    "youtu": {},
    "minicpm3": {},
    "falcon": {},
    "jetmoe": {},
    "axk1": {},
    "flint": {},
    "kolibri1": {},
    "hyperclovax": {},
    "aria_text": {},
    "gpt_neox_japanese": {},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    },
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "qwen2, sliding windows": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "llama, llama3 rope": {
        "rope_parameters": ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "qwen3, yarn": {"rope_parameters": ROPE | {"rope_type": "yarn"}},
    "phi3, longrope": {
        "rope_parameters": ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        "original_max_position_embeddings": 8,
    },
    "phi3, no window": {"sliding_window": None},
    "qwen3, tied": {"tie_word_embeddings": True},
    "mistral, no window": {"sliding_window": None},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
}
"""The families by transformers' model type, some with changed settings; text after a comma is a remark."""
FAMILIES_SHARDED = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "llama",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3, longrope",
    "gpt_oss",
    "deepseek_v3",
    "granitemoehybrid",
)
"""Families that are also trained on two processes."""


def make_config(kind: str, changes: dict[str, Any]) -> Any:
    """Return a small config for this family, with these changes to it or to its text config."""
    from transformers import AutoConfig

    kind_class = type(AutoConfig.for_model(kind))
    whole_config = kind_class()
    fields = _small(whole_config, changes)
    nested = getattr(whole_config, "text_config", None)
    if nested is not None and not isinstance(nested, dict):
        fields = {"text_config": nested.to_dict() | _small(nested, changes)}
        for part in ("vision_config", "audio_config"):
            other = getattr(whole_config, part, None)
            if other is not None and not isinstance(other, dict):
                fields[part] = other.to_dict() | _small(other, {"intermediate_size": 48})
    try:
        return kind_class(**fields)
    except (ValueError, TypeError, KeyError):
        fields.pop("head_dim", None)
        return kind_class(**fields)


def _small(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    fixed = _fixed(config)
    fields = {
        name: value
        for name, value in SIZES.items()
        if name not in fixed and getattr(config, name, None) is not None and not isinstance(getattr(config, name), list)
    }
    if "kv_lora_rank" in fields:
        fields = {name: value for name, value in fields.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    for name in LAYER_SETTINGS:
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and name not in _fixed(config):
            fields[name] = (list(dict.fromkeys(kinds)) * 2)[:2]
    return fields | changes


def _fixed(config: Any) -> set[str]:
    """Return the settings of a config that are derived from others."""
    kind = type(config)
    named = {name: kind.attribute_map.get(name, name) for name in (*SIZES, *LAYER_SETTINGS)}
    return {name for name, real in named.items() if isinstance(getattr(kind, real, None), property)}


def build(name: str) -> Any:
    """Return a random model of this family in which every part has an effect."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(make_config(name.partition(",")[0], FAMILIES.get(name, {})))
    for weight in model.eval().float().parameters():
        if weight.ndim > 1 or not weight.isfinite().all():
            torch.nn.init.normal_(weight, std=0.15)
    return model


def samples() -> list[Sample]:
    """Return samples of different lengths that share prefixes, except for one."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB - 2, 5)
    rows = []
    for number, (shared, length) in enumerate(((5, 6), (5, 14), (4, 3), (5, 9), (0, 7))):
        start = np.concatenate([prompt[:shared], rng.integers(3, VOCAB - 2, 5 - shared)])
        mask = np.ones(length, np.bool_)
        mask[0] = number % 2 == 0
        rows.append(
            Sample(
                group_id="g",
                rollout_id=f"r{number}",
                segment=0,
                step=0,
                prompt_ids=start,
                response_ids=rng.integers(3, VOCAB - 2, length),
                loss_mask=mask,
                logprobs=np.zeros(length, np.float32),
                advantages=np.ones(length, np.float32),
                weight=1.0,
            )
        )
    return rows
