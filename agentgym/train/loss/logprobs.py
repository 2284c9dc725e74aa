"""Log-probabilities of trained tokens from hidden states, tile by tile, without storing all logits at once."""

from collections.abc import Callable
from typing import Literal, TypeAlias, cast, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentgym.causal_lm.logit_map import PLAIN, LogitMap
from agentgym.train.loss.linear_head import Upstream, linear_logprobs
from agentgym.train.loss.scoring import Scoring

Head: TypeAlias = nn.Module | Callable[[Tensor], Tensor]
"""The output layer, which turns hidden states into logits."""

CHUNK = 256
"""Number of tokens whose whole distribution is in memory at once if the output layer isn't a plain linear layer."""


@overload
def token_logprobs(
    states_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Literal[True] = True,
    logits: LogitMap = PLAIN,
    upstream: Upstream | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def token_logprobs(
    states_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Literal[False],
    logits: LogitMap = PLAIN,
    upstream: Upstream | None = None,
) -> tuple[Tensor, None]: ...
def token_logprobs(
    states_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    logits: LogitMap = PLAIN,
    upstream: Upstream | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probability and entropy (nats, float32, N) of each target id, in memory that doesn't grow with N x V.

    N is the number of targets, V the size of the vocabulary and H the hidden size.

    ::

        states_NH   h0    h1    h2      targets_N[i] is scored under softmax(logits(head(states_NH[i])) / temperature)
        targets_N   t0    t1    t2      temperature 0 is treated as 1

    Gradients go to the states and, if it is trained, to the output layer. The entropy has no gradient, and is None
    with `entropy=False`. Sums and softmax are in float32, regardless of the data type of states and weights.

    A plain linear output layer is multiplied tile by tile. If its weight is frozen, this takes two multiplications,
    both in the forward pass: the derivative of a log-probability doesn't depend on the gradient that arrives in the
    backward pass, so the forward pass computes it and stores N x H numbers. If the weight is trained, the backward
    pass takes two more multiplications. With `upstream`, which predicts the gradient that will arrive, the forward
    pass takes one more instead. A wrong prediction costs time but never accuracy, because the backward pass computes
    the difference.

    Any other output layer is computed again in the backward pass, CHUNK tokens at a time, and ignores `upstream`.
    """
    how = Scoring(temperature=temperature or 1.0, logits=logits)
    if not _is_linear(head):
        return _chunked(states_NH, head, targets_N, how, entropy)
    layer = cast("nn.Linear", head)
    return linear_logprobs(states_NH, layer.weight, layer.bias, targets_N, how, entropy=entropy, upstream=upstream)


def _is_linear(head: Head) -> bool:
    """Return whether the head is only a weight and a bias: no adapter, no hook, no scale."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and not head._forward_hooks
        and not head._forward_pre_hooks
    )


def _chunked(
    states_NH: Tensor, head: Head, targets_N: Tensor, how: Scoring, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    parts = [
        checkpoint(_dense, states, head, targets, how, entropy, use_reentrant=False, preserve_rng_state=False)
        for states, targets in zip(torch.split(states_NH, CHUNK), torch.split(targets_N, CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _dense(
    states_NH: Tensor, head: Head, targets_N: Tensor, how: Scoring, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    log_NV = torch.log_softmax(how(head(states_NH).float()), -1)
    picked_N = log_NV.gather(-1, targets_N[:, None])[:, 0]
    with torch.no_grad():
        return picked_N, -(log_NV.exp() * log_NV).sum(-1) if entropy else None
