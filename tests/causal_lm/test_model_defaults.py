"""Defaults that follow the model: what activations take, and what fits into a machine's memory."""

from typing import Any

import pytest
import torch
import transformers

from agentgym.causal_lm.decoder import decoder_of
from agentgym.causal_lm.model_defaults import ModelShape, context_tokens, micro_batch_tokens, threads
from agentgym.train.policy.model import AdapterShape, PolicyModel, _adapted, _whole

TOKENS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"intermediate_size": 640},
    "Qwen3": {"head_dim": 64},
    "Gemma3Text": {"head_dim": 64, "num_key_value_heads": 1},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
}
GIB = 1 << 30


def configured(family: str, layers: int) -> Any:
    config = getattr(transformers, f"{family}Config")
    return config(**SIZES | FAMILIES[family] | {"num_hidden_layers": layers})


def policy_of(family: str, layers: int, method: str, dtype: torch.dtype) -> PolicyModel:
    config = configured(family, layers)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    adapter = AdapterShape(rank=8, alpha=8, targets=("all-linear",), rslora=False, dora=False)
    return _adapted(base, adapter) if method == "lora" else _whole(base, trained=True)


def kept_bytes(policy: PolicyModel) -> int:
    """Return the bytes that autograd keeps in a forward pass of the decoder, without the weights."""
    known = {weight.untyped_storage()._cdata for weight in (*policy.parameters(), *policy.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    states = policy.causal.get_input_embeddings()(torch.zeros(2, TOKENS // 2, dtype=torch.long)).requires_grad_()
    mask = torch.ones(2, TOKENS // 2, dtype=torch.long)
    mask[0, 0] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder_of(policy.causal)(inputs_embeds=states, attention_mask=mask, use_cache=False)
    return sum(size for place, size in kept.items() if place not in known)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_of_a_layers_activations_is_near_what_autograd_keeps(
    family: str, method: Any, dtype: torch.dtype
) -> None:
    one, two = (kept_bytes(policy_of(family, layers, method, dtype)) for layers in (1, 2))
    shape = ModelShape.of(configured(family, 1))
    guess = shape.activation_bytes(method=method, itemsize=dtype.itemsize, checkpointing=False)
    assert 0.6 < guess * TOKENS / (two - one) < 1.6


def test_checkpointing_keeps_one_whole_layer_and_the_inputs_of_the_others() -> None:
    shape = ModelShape.of(configured("Llama", 30))
    whole, inputs = (
        shape.activation_bytes(method="lora", itemsize=4, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    assert inputs == 30 * 128 * 4 + whole // 30


@pytest.mark.parametrize(
    ("kept", "device", "memory", "tokens"),
    [
        (10_000, "cpu", 64 * GIB, 16_384),  # a tiny model: no more than that is faster
        (1_320_000, "cpu", 24 * GIB, 512),  # SmolLM2-135M in 2 GiB
        (1_320_000, "cpu", 1024 * GIB, 512),  # however large the machine is
        (1_320_000, "cpu", 8 * GIB, 256),  # an eighth of a small machine
        (50_000_000, "cpu", 24 * GIB, 256),  # never less
        (8_178_892, "cuda", 79 * GIB, 2048),  # a 4B model on an H100
        (330_000, "cuda", 79 * GIB, 16_384),  # the same with checkpointing
    ],
)
def test_a_micro_batch_has_as_many_tokens_as_the_memory_has_room_for(
    kept: int, device: Any, memory: int, tokens: int
) -> None:
    assert micro_batch_tokens(kept, device, memory) == tokens


@pytest.mark.parametrize(
    ("positions", "slots", "memory", "context"),
    [
        (256, 64, 8 * GIB, 256),  # the model has no more
        (1 << 20, 64, 2 * GIB, GIB // (64 * 2 * 2 * 64 * 4)),  # 1 GiB on any machine
        (1 << 20, 64, 8 * GIB, 2 * GIB // (64 * 2 * 2 * 64 * 4)),  # slots, layers, keys and values, values, bytes
        (1 << 20, 1 << 20, 8 * GIB, 512),  # even if there were room for fewer
    ],
)
def test_the_default_context_is_the_models_positions_as_far_as_memory_holds_them(
    positions: int, slots: int, memory: int, context: int
) -> None:
    shape = ModelShape(layers=2, hidden=128, intermediate=384, query=128, key=64, positions=positions)
    assert context_tokens(shape, 4, slots, "cpu", memory) == context


def test_only_a_large_model_on_a_cpu_uses_all_processors() -> None:
    assert threads(135_000_000, "cpu", 8) == 8
    assert threads(400_000, "cpu", 8) == threads(135_000_000, "cuda", 8) == 1
