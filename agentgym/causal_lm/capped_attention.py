"""Attention with capped scores or sinks, for which torch has no fused kernel on a CPU."""

import math

import torch
from torch import Tensor


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention output for queries, keys and values of shape [batch, heads, tokens, width].

    Args:
        query: The queries.
        key: The keys, with as many heads as the queries.
        value: The values of the keys.
        seen: True where a query attends to a key; of a shape that broadcasts to [batch, heads, queries, keys].
        scale: Factor of the query-key products; None means 1 / the square root of the width.
        softcap: Bound c of the scores, which become c tanh(score / c); None sets no bound.
        sinks_H: Score of an extra token (a sink) that has no value, for each head; None if there is no such token.
    """
    score = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~seen, -math.inf)
    if sinks_H is not None:
        sinks = sinks_H.reshape(1, -1, 1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, sinks.to(score.dtype)], -1)
    weight = torch.softmax(score, -1, dtype=torch.float32).to(value.dtype)
    return weight[..., : key.shape[2]] @ value
