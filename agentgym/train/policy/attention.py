"""Attention for one row of many samples, on unmodified transformers models.

A token attends to the tokens before it in its own sample and to no others. The module registers an attention
implementation, to which the decoder hands its keyword arguments. On a CPU it computes only the pairs that attend:
scaled dot products of each unbranched run with the tokens before it. On a GPU it is FlexAttention with a block mask.
No matrix of T x T is ever held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from agentgym.types import Ints

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "agentgym_row"
"""Name of the attention implementation, and of the argument that reaches it through the decoder."""
BLOCK = 128
"""Number of tokens on each side of a block of FlexAttention's mask."""
QUERIES = 512
"""Most queries of one dot product under an explicit mask, which bounds the size of the mask."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which a model changes its attention's scores, which the CPU path does not support."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """A row of tokens as unbranched runs, each with the tokens that it follows.

    ::

        row           P P a b | c          (samples P P a b and P P a c)
        runs          P P a b   c          queries  4 1
        keys          0 1 2 3   0 1 2 4    sizes    4 4
    """

    queries: list[int]
    """Number of tokens of each run."""
    keys: Tensor | None
    """int64: for each run, the positions of the tokens before it in its samples and of its own; None if they are the
    row."""
    sizes: list[int]
    """Number of keys of each run."""


Visible: TypeAlias = "Runs | BlockMask"


def attend_in_rows(model: Any) -> None:
    """Make the model attend within the samples of a row; ValueError for a model with layers for which that is wrong.

    `model` is a transformers model, with or without an adapter; its code is not touched.
    """
    from transformers import AttentionInterface

    reason = _refusal(model)
    if reason is not None:
        raise ValueError(f"layout: {model.config.model_type} has {reason}; use layout padded")
    AttentionInterface.register(NAME, _attend)
    model.set_attn_implementation(NAME)


def row_attention(end_T: Ints, device: torch.device) -> dict[str, Visible]:
    """Return the decoder's argument for a row in which query q attends to key k if and only if `k <= q < end_T[k]`."""
    return {NAME: runs(end_T) if device.type == "cpu" else block_mask(end_T, device)}


def runs(end_T: Ints) -> Runs:
    """Return the runs of a row; a token starts one if the token before it in the row is not its parent."""
    starts = [0, *(np.flatnonzero(end_T[:-1] <= np.arange(1, len(end_T))) + 1).tolist()]
    paths = [np.flatnonzero(end_T[:start] > start) for start in starts]
    spans = list(pairwise([*starts, len(end_T)]))
    queries = [stop - start for start, stop in spans]
    keys = None
    if any(map(len, paths)):
        pieces = [part for path, span in zip(paths, spans, strict=True) for part in (path, np.arange(*span))]
        keys = torch.from_numpy(np.concatenate(pieces))
    return Runs(queries=queries, keys=keys, sizes=[n + len(path) for n, path in zip(queries, paths, strict=True)])


def block_mask(end_T: Ints, device: torch.device) -> "BlockMask":
    """Return FlexAttention's mask for a row, from the smallest and the largest end in each block.

    With `first` and `stop` the bounds of a block of queries that lies after a block of keys::

        some pair attends      largest end > first         (if any query attends, the first one does)
        all pairs attend       smallest end >= stop         (never in a last block that is not whole)
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-len(end_T) // BLOCK)
    padded_T = np.zeros(count * BLOCK, np.int64)
    padded_T[: len(end_T)] = end_T
    ends = padded_T.reshape(count, BLOCK)
    first = np.arange(count) * BLOCK
    before = np.tri(count, k=-1, dtype=np.bool_)  # queries down, keys across
    full = before & (ends.min(1) >= first[:, None] + BLOCK)
    some = (before & (ends.max(1) > first[:, None]) & ~full) | np.eye(count, dtype=np.bool_)
    end = torch.from_numpy(padded_T).to(device)

    def attends(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    mask: BlockMask = BlockMask.from_kv_blocks(
        *_blocks(some, device),
        *_blocks(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(len(end_T),) * 2,
    )
    return mask


def _blocks(dense: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's form of a matrix of blocks: the count in each row, and the columns, true ones first."""
    table = torch.from_numpy(dense).to(device)[None, None].int()
    return table.sum(-1, dtype=torch.int32), table.argsort(dim=-1, descending=True, stable=True).int()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention in the form that transformers calls; returns [batch, tokens, heads, width]."""
    visible = rest.pop(NAME, None)
    if visible is None:
        raise ValueError("layout: the model's layers are not handed which tokens to attend to; use layout padded")
    if not isinstance(visible, Runs):
        from transformers.integrations.flex_attention import flex_attention_forward

        return flex_attention_forward(module, query, key, value, visible, scaling=scaling, **rest)[0], None
    extra = [name for name in UNSUPPORTED if rest.get(name) is not None]
    if extra or rest.get("dropout"):
        raise ValueError(f"layout: the model's attention has {(extra or ['dropout'])[0]}; use layout padded")
    return _attend_runs(visible, query, key, value, scaling).transpose(1, 2).contiguous(), None


def _attend_runs(row: Runs, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attend run by run, in shapes [batch, heads, tokens, width]; a head of key and value may serve several queries."""
    share = query.shape[1] // key.shape[1]
    # One gather and one split for all runs: each has a gradient as large as the row.
    keys, values = (x if row.keys is None else x.index_select(2, row.keys) for x in (key, value))
    if share > 1:
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    parts = zip(
        torch.split(query, row.queries, 2),
        torch.split(keys, row.sizes, 2),
        torch.split(values, row.sizes, 2),
        strict=True,
    )
    return torch.cat([out for q, k, v in parts for out in _causal(q, k, v, scale)], 2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Sequence[Tensor]:
    """Attend causally: the last query to all keys, each one before it to one less; in parts of at most QUERIES."""
    count, before = query.shape[2], key.shape[2] - query.shape[2]
    if not before:
        return [scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)]
    parts = []
    for start in range(0, count, QUERIES):
        stop = min(start + QUERIES, count)
        seen = torch.ones(stop - start, before + stop, dtype=torch.bool, device=query.device).tril(before + start)
        k, v = key[:, :, : before + stop], value[:, :, : before + stop]
        parts.append(
            scaled_dot_product_attention(query[:, :, start:stop], k, v, attn_mask=seen[None, None], scale=scale)
        )
    return parts


def _refusal(model: Any) -> str | None:
    """Return the kind of layer for which a row of several samples would be wrong, or None."""
    config = model.config.get_text_config()
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    if kinds:
        return f"{kinds[0]} layers"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None):
        return f"sliding_attention layers (sliding_window {window})"
    if getattr(model, "_is_stateful", False):
        return "recurrent layers"
    if not model.is_backend_compatible():
        return "attention layers of its own"
    return None
