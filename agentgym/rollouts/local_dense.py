"""Dense decoders by their arithmetic alone: what a small model's step costs is mostly the Python around it.

Llama, Mistral, Qwen2 and Qwen3 are one computation, with or without biases and norms of queries and keys; their own
modules do it in five times as many calls. Weights stay the model's: it sees merged adapters, and nothing is copied.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Model types; beyond these nothing is assumed, and whoever uses this checks it against the model's own logits."""

Update: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Takes new keys and values [rows, heads, width, dim] and their layer's number; gives all that may be attended to."""


def dense(model: Any, context: int) -> "Dense | None":
    """The model's decoder for at most `context` positions; None for a model that is computed by its own modules."""
    config = model.config.get_text_config()
    if config.model_type not in KNOWN or config.hidden_act != "silu" or model.dtype != torch.float32:
        return None
    with torch.inference_mode():
        return Dense(model.get_decoder(), context)


class Dense:
    """Last hidden states, normed, [rows, width, hidden], of ids at positions, under a mask [rows, 1, width, reach]."""

    def __init__(self, decoder: Any, context: int) -> None:
        self._embedding = decoder.embed_tokens.weight
        self._norm = decoder.norm
        self._layers = [_Layer(number, layer) for number, layer in enumerate(decoder.layers)]
        positions = torch.arange(context, device=self._embedding.device)[None]
        cos, sin = (turn[0] for turn in decoder.rotary_emb(self._embedding, positions))
        half = sin.shape[-1] // 2
        # The halves of a rotated vector change places, and one changes its sign: here the sine's.
        self._turns = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)], 1)

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, update: Update) -> Tensor:
        hidden = functional.embedding(ids, self._embedding)
        turns = self._turns[positions].unsqueeze(3)
        cos, sin = turns[:, :, 0], turns[:, :, 1]
        for layer in self._layers:
            hidden = layer(hidden, mask, cos, sin, update)
        return _normed(hidden, self._norm)


class _Layer:
    """One decoder layer; matrices that read the same input are one matrix, of which the modules keep their parts."""

    def __init__(self, number: int, layer: Any) -> None:
        self._number = number
        attention, mlp = layer.self_attn, layer.mlp
        self._dim = attention.head_dim
        self._heads = attention.q_proj.out_features // self._dim
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._scale = attention.scaling
        self._qkv, self._qkv_bias = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up, self._gate_up_bias = joined([mlp.gate_proj, mlp.up_proj])
        self._out, self._down = attention.o_proj, mlp.down_proj
        self._before, self._between = layer.input_layernorm, layer.post_attention_layernorm
        self._qk_norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            sides = ((attention.q_norm, self._heads), (attention.k_norm, self._kv_heads))
            self._qk_norm = torch.cat([norm.weight.expand(heads, -1) for norm, heads in sides])
            self._eps = attention.q_norm.variance_epsilon

    def __call__(self, hidden: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, update: Update) -> Tensor:
        rows, width, _ = hidden.shape
        qkv = functional.linear(_normed(hidden, self._before), self._qkv, self._qkv_bias)
        qkv = qkv.view(rows, width, -1, self._dim)
        both = self._heads + self._kv_heads
        qk, values = qkv[:, :, :both], qkv[:, :, both:]
        if self._qk_norm is not None:
            qk = functional.rms_norm(qk, (self._dim,), eps=self._eps) * self._qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(self._dim // 2, -1), sin).transpose(1, 2)
        keys, values = update(qk[:, self._heads :], values.transpose(1, 2), self._number)
        seen = functional.scaled_dot_product_attention(
            qk[:, : self._heads],
            keys,
            values,
            attn_mask=mask,
            scale=self._scale,
            enable_gqa=self._heads != self._kv_heads,
        )
        hidden = hidden + _linear(seen.transpose(1, 2).reshape(rows, width, -1), self._out)
        gate, up = functional.linear(_normed(hidden, self._between), self._gate_up, self._gate_up_bias).chunk(2, -1)
        return hidden + _linear(functional.silu(gate) * up, self._down)


def joined(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for the layers' outputs side by side; theirs become parts of it."""
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    row = 0
    for part in parts:
        rows = slice(row, row + part.out_features)
        part.weight.data = weight[rows]
        if bias is not None:
            part.bias.data = bias[rows]
        row += part.out_features
    return weight, bias


def _linear(inputs: Tensor, layer: nn.Linear) -> Tensor:
    return functional.linear(inputs, layer.weight, layer.bias)


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
