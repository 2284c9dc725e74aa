"""The clipped policy-gradient loss, indifferent to how its batch was cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from agentgym.train.batch import Batch
from agentgym.types import Sample

Normalise: TypeAlias = Literal["token", "sample", "rollout"] | float
Correction: TypeAlias = Literal["none", "token", "sequence", "token_mask", "sequence_mask"]


class Ratio(TypedDict):
    """What is made of the ratio between this policy and the one that sampled."""

    clip_low: float
    clip_high: float
    correction: Correction
    cap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What one micro-batch adds to the figures of a step: sums over its trained tokens, one maximum."""

    loss: float
    tokens: int
    clipped: float
    """Tokens whose gradient the clip stopped, or whose importance weight was cut to the cap or to 0."""
    kl: float
    """Sum of r - 1 - log r, r = probability here / engine's: k3 of Schulman 2020, "Approximating KL divergence"."""
    entropy: float
    gap: float
    """Largest |log-probability here - the engine's|, nats."""


def denominator(samples: Sequence[Sample], normalise: Normalise) -> float:
    """What a mini-batch's sum is divided by, before its first forward: its tokens, samples, rollouts or a constant."""
    if normalise == "token":
        return float(sum(int(row.loss_mask.sum()) for row in samples))
    if normalise == "sample":
        return float(sum(bool(row.loss_mask.any()) for row in samples))
    if normalise == "rollout":
        return float(len({row.rollout_id for row in samples}))
    if isinstance(normalise, str) or not normalise > 0:
        raise ValueError(f"normalise: {normalise!r} is none of token, sample, rollout or a number above 0")
    return float(normalise)


def weighted_sum(values_BR: Tensor, loss_mask_BR: Tensor, weight_B: Tensor, normalise: Normalise) -> Tensor:
    """Sum over the trained tokens, each times its weight; divide by `denominator` for the mean.

    ::

        token, constant   1
        sample            1 / trained tokens of its sample
        rollout           1 / trained tokens of its rollout     (weight_B / trained tokens of its sample)

    Sums of parts add up to the sum of the whole, so micro-batches, padding and ranks change nothing; nor does
    merging, except under "sample", which counts what merging joins.
    """
    if normalise in ("sample", "rollout"):
        share_B = torch.ones_like(weight_B) if normalise == "sample" else weight_B
        values_BR = values_BR * (share_B / loss_mask_BR.sum(-1).clamp(min=1))[:, None]
    return torch.where(loss_mask_BR, values_BR, 0.0).sum()


def policy_loss(
    logprobs_BR: Tensor,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction = "none",
    cap: float = 2.0,
    normalise: Normalise,
    denominator: float,
) -> Tensor:
    """This batch's term of the policy loss, a scalar; terms of a mini-batch add up to its loss.

    With r = exp(logprob here - the engine's), and a weight w of r that carries no gradient::

        correction "none"   -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)       PPO, arXiv 1707.06347
        the others          -w A, its gradient -w A grad(logprob)                   `importance_weights`

    Columns with loss mask 0 have no part in value or gradient.
    """
    # Masked before exp: what stands in a masked column may be anything, and 0 * inf is NaN in the gradient.
    log_ratio_BR = torch.where(batch.loss_mask_BR, logprobs_BR - batch.logprobs_BR, 0.0)
    if correction != "none":
        weights_BR = importance_weights(log_ratio_BR, correction=correction, cap=cap)
        one_BR = (log_ratio_BR - log_ratio_BR.detach()).exp()  # 1, with the gradient of the log-probability
        gain_BR = weights_BR * one_BR * batch.advantages_BR
        return -weighted_sum(gain_BR, batch.loss_mask_BR, batch.weight_B, normalise) / denominator
    ratio_BR = log_ratio_BR.exp()
    clipped_BR = ratio_BR.clamp(1 - clip_low, 1 + clip_high)
    gain_BR = torch.minimum(ratio_BR * batch.advantages_BR, clipped_BR * batch.advantages_BR)
    return -weighted_sum(gain_BR, batch.loss_mask_BR, batch.weight_B, normalise) / denominator


@torch.no_grad()
def importance_weights(log_ratio_BR: Tensor, *, correction: Correction, cap: float) -> Tensor:
    """What each token counts where another policy sampled it; `log_ratio_BR` is 0 where nothing is trained.

    ::

        token           min(r, cap)                     truncated: Ionides 2008; arXiv 1802.01561 (IMPALA)
        token_mask      r where 1/cap <= r <= cap, else 0
        sequence        min(R, cap) for each token, R the product of r over the row's trained tokens
        sequence_mask   R where 1/cap <= R <= cap, else 0
    """
    if correction in ("sequence", "sequence_mask"):
        log_ratio_BR = log_ratio_BR.sum(-1, keepdim=True).expand_as(log_ratio_BR)
    ratio_BR = log_ratio_BR.exp()
    if correction in ("token_mask", "sequence_mask"):
        return torch.where((ratio_BR <= cap) & (ratio_BR >= 1 / cap), ratio_BR, 0.0)
    return ratio_BR.clamp(max=cap)


@torch.no_grad()
def loss_sums(
    loss: Tensor,
    logprobs_BR: Tensor,
    entropy_BR: Tensor,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction = "none",
    cap: float = 2.0,
) -> LossSums:
    """The figures of one micro-batch."""
    mask_BR = batch.loss_mask_BR
    log_ratio_BR = torch.where(mask_BR, logprobs_BR - batch.logprobs_BR, 0.0)
    log_ratio = log_ratio_BR[mask_BR]
    ratio = log_ratio.exp()
    if correction == "none":
        advantage = batch.advantages_BR[mask_BR]
        stopped = ((ratio > 1 + clip_high) & (advantage > 0)) | ((ratio < 1 - clip_low) & (advantage < 0))
    else:
        weights = importance_weights(log_ratio_BR, correction=correction, cap=cap)[mask_BR]
        stopped = (weights == 0) | (weights == cap)
    return LossSums(
        loss=float(loss),
        tokens=log_ratio.numel(),
        clipped=float(stopped.sum()),
        kl=float((ratio - 1 - log_ratio).sum()),
        entropy=float(entropy_BR[mask_BR].sum()),
        gap=float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
    )
