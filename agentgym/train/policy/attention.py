"""Attention for one row of many samples (a `Row`), on unmodified transformers models.

A token attends to itself and to earlier tokens of its sample, if the layer's mask allows it, and to no others. The
module registers an attention implementation and its mask with transformers, which passes them to each layer. On a
CPU, the row is split into unbranched runs of tokens. Each run attends only to itself and to the tokens before it,
with a scaled dot product. On a GPU, FlexAttention computes the row with a block mask. A full T x T matrix is never
stored.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from agentgym.causal_lm.capped_attention import capped_attention
from agentgym.train.policy.row import MaskFunction, Row, RowMask, current_row
from agentgym.types.arrays import Ints

NAME = "agentgym_row"
"""Name of the attention implementation, and of the keyword argument that passes the `Row` to the decoder."""
BLOCK = 128
"""Number of tokens on each side of a block of FlexAttention's mask."""
QUERIES = 512
"""Maximum number of queries in one dot product with an explicit mask, which bounds the size of the mask."""

RUNS = True
"""Whether a CPU computes one run of tokens at a time. The test of FlexAttention turns this off."""


def register() -> None:
    """Register the attention implementation with transformers under NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def row_attention(end_T: Ints, device: torch.device) -> dict[str, Row]:
    """Return the keyword argument that makes the decoder compute these tokens as a row.

    Query q then attends to key k if and only if `k <= q < end_T[k]`.
    """
    return {NAME: Row(end_T, device)}


def block_mask(end_T: Ints, device: torch.device, depth_T: Ints | None = None, starts_D: Ints | None = None) -> Any:
    """Return FlexAttention's mask for a row whose query q attends to key k if and only if `k <= q < end_T[k]`.

    It is computed from the smallest and the largest end (`end_T`) in each block of keys. If `first` and `stop` are
    the bounds of a block of queries that lies after a block of keys::

        some pair attends      largest end > first         (if any query attends, the first one does)
        all pairs attend       smallest end >= stop         (never in a last block that isn't full)

    `depth_T` is the depth of each token: the number of tokens before it in its samples. With `starts_D`, a query of
    depth d attends to no key of a depth below `starts_D[d]`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-len(end_T) // BLOCK)
    padded_T = _in_blocks(end_T, count, 0)
    ends = padded_T.reshape(count, BLOCK)
    first = np.arange(count) * BLOCK
    before = np.tri(count, k=-1, dtype=np.bool_)  # queries as rows, keys as columns
    full = before & (ends.min(1) >= first[:, None] + BLOCK)
    some = before & (ends.max(1) > first[:, None])
    end = torch.from_numpy(padded_T).to(device)
    attends = _attends(end)
    if depth_T is not None and starts_D is not None:
        depth = _in_blocks(depth_T, count, int(depth_T[-1]))
        start = starts_D[depth]
        depths, starts = depth.reshape(count, BLOCK), start.reshape(count, BLOCK)
        full &= depths.min(1) >= starts.max(1)[:, None]
        some &= depths.max(1) >= starts.min(1)[:, None]
        attends = _attends_near(end, torch.from_numpy(depth).to(device), torch.from_numpy(start).to(device))
    some = (some & ~full) | np.eye(count, dtype=np.bool_)
    mask: BlockMask = BlockMask.from_kv_blocks(
        *_blocks(some, device),
        *_blocks(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(len(end_T),) * 2,
    )
    return mask


def _in_blocks(values_T: Ints, count: int, fill: int) -> Ints:
    padded_T = np.full(count * BLOCK, fill, np.int64)
    padded_T[: len(values_T)] = values_T
    return padded_T


def _attends(end: Tensor) -> MaskFunction:
    def attends(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return attends


def _attends_near(end: Tensor, depth: Tensor, start: Tensor) -> MaskFunction:
    def attends(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key]) & (depth[key] >= start[query])

    return attends


def _blocks(dense: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Convert a block matrix to FlexAttention's form: each row's number of true columns, and the columns' indices.

    The indices of the true columns come first.
    """
    table = torch.from_numpy(dense).to(device)[None, None].int()
    return table.sum(-1, dtype=torch.int32), table.argsort(dim=-1, descending=True, stable=True).int()


def _mask(*_: Any, mask_function: MaskFunction, **__: Any) -> RowMask:
    """Return a layer's mask as a `RowMask`. transformers calls this, with its own signature, when it creates masks."""
    row = current_row()
    if row is None:
        raise ValueError(
            "layout: the model created an attention mask outside the forward pass over a row of samples; use "
            "layout padded"
        )
    return RowMask(row, mask_function)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers calls, and return [batch, tokens, heads, width]."""
    mask = attention_mask
    if not isinstance(mask, RowMask):
        raise ValueError("layout: the model does not tell its layers which tokens to attend to; use layout padded")
    if query.shape[2] != key.shape[2]:
        raise ValueError("layout: the model attends to more keys than the row's tokens; use layout padded")
    if rest.get("dropout") or rest.get("position_bias") is not None:
        named = "dropout" if rest.get("dropout") else "position_bias"
        raise ValueError(f"layout: the model's attention has {named}; use layout padded")
    if mask.row.attending is not None:
        mask.row.attending.add(module)
    if RUNS and query.device.type == "cpu":
        scores = _Scores(scale=scaling, softcap=rest.get("softcap"), sinks_H=rest.get("s_aux"), starts_D=mask.starts_D)
        return _attend_runs(mask.row, query, key, value, scores).transpose(1, 2).contiguous(), None
    from transformers.integrations.flex_attention import flex_attention_forward

    if mask.blocks is None:
        mask.blocks = block_mask(mask.row.end_T, query.device, mask.row.depth_T, mask.starts_D)
    return flex_attention_forward(module, query, key, value, mask.blocks, scaling=scaling, **rest)[0], None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scores:
    """Changes to the query-key products that turn them into attention weights."""

    scale: float | None = None
    """Factor of the products; None means 1 / the square root of the width."""
    softcap: float | None = None
    """Bound c of the scores, which become c tanh(score / c); None sets no bound."""
    sinks_H: Tensor | None = None
    """Score of an extra token (a sink) that has no value, for each head; None if there is no such token."""
    starts_D: Ints | None = None
    """For each depth, the depth of the first token that a token of this depth attends to; None if it is always 0."""

    @property
    def plain(self) -> bool:
        """Whether a fused kernel can compute the scores, because they have neither a cap nor sinks."""
        return self.softcap is None and self.sinks_H is None


def _attend_runs(row: Row, query: Tensor, key: Tensor, value: Tensor, scores: _Scores) -> Tensor:
    """Compute the attention of each run in the row separately.

    Tensors have the shape [batch, heads, tokens, width]. Several query heads may share a key head.
    """
    share, runs = query.shape[1] // key.shape[1], row.runs
    # Gather and split once for all runs, because the gradient of each such operation is as large as the row.
    keys, values = (x if runs.keys is None else x.index_select(2, runs.keys) for x in (key, value))
    if share > 1:
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    parts = zip(
        torch.split(query, runs.queries, 2),
        torch.split(keys, runs.sizes, 2),
        torch.split(values, runs.sizes, 2),
        strict=True,
    )
    return torch.cat([out for q, k, v in parts for out in _causal(q, k, v, scores)], 2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scores: _Scores) -> list[Tensor]:
    """Return the causal attention of one run, in parts of at most QUERIES queries.

    The keys are the tokens at the depths 0, 1, 2 ..., and the queries are the last of these tokens. The last query
    attends to all keys, and each earlier query to one key less than the next.
    """
    count, before = query.shape[2], key.shape[2] - query.shape[2]
    if not before and scores.plain and scores.starts_D is None:
        return [scaled_dot_product_attention(query, key, value, is_causal=True, scale=scores.scale)]
    parts = []
    for start in range(0, count, QUERIES):
        stop = min(start + QUERIES, count)
        depths = torch.arange(before + start, before + stop, device=query.device)[:, None]
        low = 0 if scores.starts_D is None else int(scores.starts_D[before + start : before + stop].min())
        keys = torch.arange(low, before + stop, device=query.device)
        seen = keys <= depths
        if scores.starts_D is not None:
            seen &= keys >= torch.from_numpy(scores.starts_D[before + start : before + stop])[:, None]
        q, k, v = query[:, :, start:stop], key[:, :, low : before + stop], value[:, :, low : before + stop]
        if scores.plain:
            parts.append(scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None], scale=scores.scale))
        else:
            out = capped_attention(q, k, v, seen, scale=scores.scale, softcap=scores.softcap, sinks_H=scores.sinks_H)
            parts.append(out)
    return parts
