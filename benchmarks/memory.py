"""GPU memory of training, counted on meta tensors: weights, adapter, optimizer, activations and KV cache.

`python -m benchmarks.memory [--rank N] [--row-tokens N] [--json]` counts for the shapes of Qwen3-4B and Qwen3-8B.

The policy is the trainer's own, without its weights. Activations are the tensors that autograd keeps in a forward
pass of one and of two layers; the difference is one layer. Attention is counted as a kernel that keeps queries, keys,
values and its output, as FlashAttention and FlexAttention do. Nothing runs on a GPU: memory that the allocator, CUDA
and kernels use in addition is not counted.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, Qwen3Config

from agentgym.causal_lm.decoder import decoder_of
from agentgym.train.policy.fsdp import checkpoint_layers
from agentgym.train.policy.model import PolicyModel, empty_policy
from agentgym.train.policy.targets import ALL_LINEAR
from benchmarks.harness import program

GIB = 2**30
TRAINED_BYTES = 16
"""Bytes per trained weight, all float32: the weight, its gradient and AdamW's two moments."""
COUNTED_TOKENS = 64
"""Tokens of the counted forward pass; every tensor that is kept grows linearly with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Qwen3, as its public config.json has them."""

    hidden: int
    intermediate: int
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936
    tied: bool
    """Whether the output layer is the embedding."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "Qwen3-4B": Shape(hidden=2560, intermediate=9728, tied=True),
    "Qwen3-8B": Shape(hidden=4096, intermediate=12_288, tied=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of training a model of one shape in bfloat16, on one GPU without sharding."""

    parameters: int
    weight_bytes: int
    adapter_parameters: int
    adapter_bytes: int
    """The adapter, its gradient and the optimizer's moments."""
    layer_bytes: int
    """Bytes per token that one layer keeps for its backward pass."""
    checkpoint_bytes: int
    """Bytes per token that one layer keeps with train.checkpointing: its input."""
    layers: int
    kv_bytes: int
    """Bytes of the KV cache of one token."""
    full_layer_bytes: int
    """Bytes per token that one layer keeps for its backward pass if all weights are trained."""
    gathered_bytes: int
    """Bytes, in bfloat16, of the largest part that FSDP2 gathers at once if all weights are trained: embedding and
    output layer.
    """

    @property
    def full_bytes(self) -> int:
        """Bytes of all weights if they are trained: weights, gradients and moments."""
        return TRAINED_BYTES * self.parameters

    def full_total_bytes(self, tokens: int, *, gpus: int) -> int:
        """Return the bytes on each GPU in a forward pass with checkpointing, if all weights are trained."""
        activations = tokens * (self.layers * self.checkpoint_bytes + self.full_layer_bytes)
        return self.full_bytes // gpus + self.gathered_bytes + activations

    def activation_bytes(self, tokens: int, *, checkpointing: bool) -> int:
        """Return the bytes that a forward pass of `tokens` keeps; checkpointing keeps one whole layer at a time."""
        if checkpointing:
            return tokens * (self.layers * self.checkpoint_bytes + self.layer_bytes)
        return tokens * self.layers * self.layer_bytes

    def total_bytes(self, tokens: int, *, gpus: int) -> int:
        """Return the bytes on each GPU in a forward pass with checkpointing.

        Weights are sharded over all GPUs.
        """
        return (self.weight_bytes + self.adapter_bytes) // gpus + self.activation_bytes(tokens, checkpointing=True)


class _Kernel(torch.autograd.Function):
    """Attention with the memory of a real kernel: it keeps its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
    kept: Any = _Kernel.apply(query, key, value)  # type: ignore[no-untyped-call]
    return kept.transpose(1, 2), None


AttentionInterface.register("counted", _attend)


def count(shape: Shape, *, rank: int) -> Memory:
    """Count the memory of a model of this shape with an adapter of this rank on all linear layers."""
    whole = _policy(shape, rank, layers=shape.layers)
    base = [weight for weight in whole.parameters() if not weight.requires_grad]
    adapter = sum(weight.numel() for weight in whole.parameters() if weight.requires_grad)
    kept = {layers: _kept(_policy(shape, rank, layers=layers)) for layers in (1, 2)}
    full = {layers: _kept(_policy(shape, None, layers=layers)) for layers in (1, 2)}
    inputs = {layers: _kept(_policy(shape, rank, layers=layers, checkpointing=True)) for layers in (1, 2)}
    return Memory(
        parameters=sum(weight.numel() for weight in base),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in base),
        adapter_parameters=adapter,
        adapter_bytes=TRAINED_BYTES * adapter,
        layer_bytes=(kept[2] - kept[1]) // COUNTED_TOKENS,
        checkpoint_bytes=(inputs[2] - inputs[1]) // COUNTED_TOKENS,
        layers=shape.layers,
        kv_bytes=shape.kv_bytes,
        full_layer_bytes=(full[2] - full[1]) // COUNTED_TOKENS,
        gathered_bytes=2 * shape.vocabulary * shape.hidden * (1 if shape.tied else 2),
    )


def _policy(shape: Shape, rank: int | None, *, layers: int, checkpointing: bool = False) -> PolicyModel:
    """Return the trainer's policy of this shape on the meta device; without a rank, all of its weights are trained."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    adapter: Any = rank and {"rank": rank, "alpha": rank, "targets": (ALL_LINEAR,), "rslora": False, "dora": False}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(Path(folder))
        policy = empty_policy(folder, dtype=torch.bfloat16, shape=adapter)
    policy.causal.set_attn_implementation("counted")
    if checkpointing:
        checkpoint_layers(policy)
    return policy


def _kept(policy: PolicyModel) -> int:
    """Return the bytes that autograd keeps in one forward pass of the decoder, without the weights."""
    weights = {_storage(weight) for weight in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[_storage(tensor)] = tensor
        return tensor

    ids = torch.zeros(1, COUNTED_TOKENS, dtype=torch.long, device="meta")
    states = policy.causal.get_input_embeddings()(ids).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = decoder_of(policy.causal)(inputs_embeds=states, use_cache=False)
    del out
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def _storage(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def rows(memory: Memory, row_tokens: int) -> dict[str, str]:
    """Return the cells of the guide's table for one model, by row."""

    def gib(count: float) -> str:
        return f"{count / GIB:.1f} GiB"

    return {
        "weights of the model": f"{memory.parameters:,}",
        "their memory": gib(memory.weight_bytes),
        "weights of the adapter": f"{memory.adapter_parameters:,}",
        "adapter, gradient, AdamW": gib(memory.adapter_bytes),
        "activations of a token": f"{memory.activation_bytes(1, checkpointing=False) / 2**20:.1f} MiB",
        "activations of a row": gib(memory.activation_bytes(row_tokens, checkpointing=False)),
        "with checkpointing": gib(memory.activation_bytes(row_tokens, checkpointing=True)),
        "all of it on one GPU": gib(memory.total_bytes(row_tokens, gpus=1)),
        "on each of four GPUs": gib(memory.total_bytes(row_tokens, gpus=4)),
        "method full: weights, gradients, AdamW": gib(memory.full_bytes),
        "method full, all of it on one GPU": gib(memory.full_total_bytes(row_tokens, gpus=1)),
        "method full, on each of four GPUs": gib(memory.full_total_bytes(row_tokens, gpus=4)),
        "method full, on each of eight GPUs": gib(memory.full_total_bytes(row_tokens, gpus=8)),
        "KV cache of a token": f"{memory.kv_bytes / 1024:.0f} KiB",
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=program(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rank", type=int, default=32, help="rank of the adapter")
    made.add_argument("--row-tokens", type=int, default=16_384, help="train.max_tokens_per_microbatch")
    made.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    return made


def main() -> None:
    """Print the table."""
    asked = parser().parse_args()
    found = {name: rows(count(shape, rank=asked.rank), asked.row_tokens) for name, shape in SHAPES.items()}
    if asked.json:
        print(json.dumps(found))
        return
    for line in next(iter(found.values())):
        print(f"{line:40}", *(f"{found[name][line]:>16}" for name in found))


if __name__ == "__main__":
    main()
