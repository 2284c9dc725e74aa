"""Log-probabilities of trained tokens from hidden states, and nothing of the others."""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1024
"""Positions whose full distribution is held at once for the entropy."""


def response_logprobs(
    hidden_BTH: Tensor,
    head: Callable[[Tensor], Tensor],
    input_ids_BT: Tensor,
    loss_mask_BR: Tensor,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats, float32, BR) of each trained response token; 0 elsewhere.

    ::

        input_ids_BT     P  P  a  a      a at column c is predicted by the hidden state of column c - 1
        hidden_BTH       .  h  h  .      so the responses' states are [:, -R-1:-1]

    Those of the distribution at `temperature`; 0 is treated as 1. Only the states of trained tokens pass
    through the output layer, N x V logits for N trained tokens. The entropy carries no gradient.
    """
    response = loss_mask_BR.shape[1]
    states_NH = hidden_BTH[:, -response - 1 : -1][loss_mask_BR]
    targets_N = input_ids_BT[:, -response:][loss_mask_BR]
    logits_NV = head(states_NH).float() / (temperature or 1.0)
    log_NV = torch.log_softmax(logits_NV, -1)
    picked_N = log_NV.gather(-1, targets_N[:, None])[:, 0]
    zeros_BR = picked_N.new_zeros(loss_mask_BR.shape)
    logprobs_BR = zeros_BR.masked_scatter(loss_mask_BR, picked_N)
    return logprobs_BR, zeros_BR.masked_scatter(loss_mask_BR, _entropy(log_NV))


def token_logprobs(
    states_NH: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats, float32) of each target, predicted by its state.

    Those of the distribution at `temperature`; 0 is treated as 1. The entropy carries no gradient, and is 0 unless
    asked for.
    """
    logits_NV = head(states_NH).float() / (temperature or 1.0)
    log_NV = torch.log_softmax(logits_NV, -1)
    picked_N = log_NV.gather(-1, targets_N[:, None])[:, 0]
    return picked_N, _entropy(log_NV) if entropy else torch.zeros_like(picked_N)


@torch.no_grad()
def _entropy(log_NV: Tensor) -> Tensor:
    if not len(log_NV):
        return log_NV.new_zeros(0)
    return torch.cat([-(part.exp() * part).sum(-1) for part in torch.split(log_NV, CHUNK)])
