"""Fast decoders for some model types, which compute without the model's own modules.

Most of the time of a small model's step is Python overhead. Llama, Mistral, Qwen2 and Qwen3 do the same computation,
with or without biases, and with or without norms of queries and keys. Their own modules need five times as many calls
for it. The weights are still the model's own tensors, so merged adapters take effect and nothing is copied.

In the shapes below, `rows` is the number of slots in a step, `width` the number of ids per row, and `reach` the number
of columns of keys and values to attend to.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentgym.causal_lm.decoder import decoder_of
from agentgym.engines.transformers.shared_prefix import Prefix

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Supported model types. The caller must still compare the results with those of the model itself."""

Update: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A function that stores a layer's new keys and values, [rows, heads, width, dim], and returns all keys and values that
may be attended to. Its third argument is the layer's index.
"""


def dense(model: Any, context: int) -> "Dense | None":
    """Return a fast decoder for at most `context` positions, or None if the model must run through its own modules."""
    config = model.config.get_text_config()
    if config.model_type not in KNOWN or config.hidden_act != "silu" or model.dtype != torch.float32:
        return None
    if context > _window(config):
        return None
    with torch.inference_mode():
        return Dense(decoder_of(model), context)


def _window(config: Any) -> float:
    """Return the number of ids that each layer attends to, if all of them are in its context; infinity for no limit."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return math.inf if window is None or (kinds and "sliding_attention" not in kinds) else float(window)


class Dense:
    """A fast decoder. It computes the hidden states after the final norm, [rows, width, hidden].

    A call takes the ids, their positions, and a mask [rows, 1, width, reach] that is true for the columns to attend to.
    """

    def __init__(self, decoder: Any, context: int) -> None:
        self._embedding = decoder.embed_tokens.weight
        self._norm = _Norm(decoder.norm)
        self._layers = [_Layer(number, layer) for number, layer in enumerate(decoder.layers)]
        positions = torch.arange(context, device=self._embedding.device)[None]
        cos, sin = (turn[0] for turn in decoder.rotary_emb(self._embedding, positions))
        half = sin.shape[-1] // 2
        # Rotary embedding swaps a vector's halves and negates one. Here, half of the sine is negated instead.
        self._turns = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)], 1)

    def __call__(
        self, ids: Tensor, mask: Tensor, positions: Tensor, update: Update, prefix: Prefix | None = None
    ) -> Tensor:
        hidden = functional.embedding(ids, self._embedding)
        turns = self._turns[positions].unsqueeze(3)
        cos, sin = turns[:, :, 0], turns[:, :, 1]
        added = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)  # once for all layers
        for layer in self._layers:
            hidden = layer(hidden, added, cos, sin, update, prefix)
        return self._norm(hidden)


class _Norm:
    """Root mean square norm with a weight."""

    def __init__(self, norm: Any) -> None:
        self._weight, self._shape, self._eps = norm.weight, norm.weight.shape, norm.variance_epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self._shape, self._weight, self._eps)


class _Layer:
    """One decoder layer.

    Weight matrices that have the same input are joined into one matrix. The model's modules keep views of their parts.
    """

    def __init__(self, number: int, layer: Any) -> None:
        self._number = number
        attention, mlp = layer.self_attn, layer.mlp
        self._dim = attention.head_dim
        self._heads = attention.q_proj.out_features // self._dim
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._scale = attention.scaling
        # Tensors, not modules: an attribute lookup on a module costs as much as a small operation.
        self._qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self._out = (attention.o_proj.weight, attention.o_proj.bias)
        self._down = (mlp.down_proj.weight, mlp.down_proj.bias)
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._qk_norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            sides = ((attention.q_norm, self._heads), (attention.k_norm, self._kv_heads))
            self._qk_norm = torch.cat([norm.weight.expand(heads, -1) for norm, heads in sides])
            self._eps = attention.q_norm.variance_epsilon

    def __call__(
        self, hidden: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, update: Update, prefix: Prefix | None
    ) -> Tensor:
        rows, width, _ = hidden.shape
        qkv = functional.linear(self._before(hidden), *self._qkv).view(rows, width, -1, self._dim)
        both = self._heads + self._kv_heads
        qk, values = qkv[:, :, :both], qkv[:, :, both:]
        if self._qk_norm is not None:
            qk = functional.rms_norm(qk, (self._dim,), eps=self._eps) * self._qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(self._dim // 2, -1), sin).transpose(1, 2)
        keys, values = update(qk[:, self._heads :], values.transpose(1, 2), self._number)
        query = qk[:, : self._heads]
        if prefix is not None:
            seen = self._attend_shared(query, keys, values, mask, prefix)
        elif width == 1:
            seen = self._attend_one(query, keys, values, mask)
        else:
            seen = self._attend(query, keys, values, mask)
        hidden = hidden + functional.linear(seen, *self._out)
        gate, up = functional.linear(self._between(hidden), *self._gate_up).chunk(2, -1)
        return hidden + functional.linear(functional.silu(gate).mul_(up), *self._down)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the attention output [rows, width, heads x dim] for a query [rows, heads, width, dim]."""
        grouped = self._heads != self._kv_heads
        seen = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=self._scale, enable_gqa=grouped
        )
        return seen.transpose(1, 2).flatten(2)

    def _attend_one(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the same as `_attend`, if each row has exactly one query.

        It computes the two matrix products itself, because the fused attention kernel is slower for a single query.
        """
        scores = self._scores(query, keys, mask)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(len(query), 1, -1)

    def _attend_shared(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, prefix: Prefix) -> Tensor:
        """Return the same as `_attend_one`, but read a shared prefix's keys and values once for all its rows."""
        length, rows, heads = prefix.length, len(query), self._kv_heads
        own = self._scores(query, keys[:, :, length:], mask[..., length:])
        alike = torch.bmm(
            prefix.gather(query.reshape(rows, heads, -1, self._dim)), prefix.read(keys).transpose(1, 2) * self._scale
        )
        weights = torch.cat([prefix.spread(alike, heads).flatten(0, 1), own], -1).softmax(-1)
        seen = torch.bmm(weights[..., length:], values[:, :, length:].flatten(0, 1))
        shared = torch.bmm(prefix.gather(weights[..., :length].view(rows, heads, -1, length)), prefix.read(values))
        return (seen.view(rows, heads, -1, self._dim) + prefix.spread(shared, heads)).view(rows, 1, -1)

    def _scores(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Return attention scores [rows x key heads, queries, reach] for one query per row.

        The queries of a key head are those of the query heads that share the key head.
        """
        query = query.reshape(len(query) * self._kv_heads, -1, self._dim)
        mask = mask.expand(-1, self._kv_heads, -1, -1).reshape(-1, 1, keys.shape[2])
        return torch.baddbmm(mask, query, keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)


def joined(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Join linear layers into one weight and bias, with their outputs side by side.

    The layers' own tensors become views of the joined ones.
    """
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
