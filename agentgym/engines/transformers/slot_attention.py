"""Attention over KV slots for unmodified transformers models, with each layer's own mask.

The module registers an attention implementation and its mask with transformers. A model then asks for the mask of each
kind of layer, such as full attention or a sliding window, and passes the function that defines it. The function is
evaluated at the positions of the ids that each row of the batch computes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from agentgym.causal_lm.capped_attention import capped_attention

NAME = "agentgym_slots"
"""Name of the attention implementation."""


def register() -> None:
    """Register the attention implementation with transformers under NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: Any,
    device: torch.device,
    **rest: Any,
) -> Tensor | None:
    """Return a layer's mask, [rows, 1, queries, keys]. transformers calls this, with its own signature.

    `q_offset` is the positions of the queries, [rows, queries], if the pass computes slots. In a plain forward pass it
    is a number, and transformers makes the mask.
    """
    if not isinstance(q_offset, Tensor):
        from transformers.masking_utils import sdpa_mask

        plain: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, mask_function=mask_function, device=device, **rest
        )
        return plain
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    keys = torch.arange(kv_length, device=device)[None, None, None]
    mask: Tensor = mask_function(rows, torch.zeros_like(rows), q_offset[:, None, :, None], keys)
    return mask.expand(batch_size, 1, q_length, kv_length)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers calls, and return [batch, tokens, heads, width]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is None and s_aux is None:
        seen: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return seen
    if attention_mask is None:
        shape = query.shape[2], key.shape[2]
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(shape[1] - shape[0])
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    out = capped_attention(query, key, value, attention_mask, scale=scaling, softcap=softcap, sinks_H=s_aux)
    return out.transpose(1, 2).contiguous(), None
