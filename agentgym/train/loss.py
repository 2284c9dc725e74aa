"""The clipped policy-gradient loss, indifferent to how its batch was cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentgym.train.batch import Batch
from agentgym.types import Sample

Normalise: TypeAlias = Literal["token", "sample", "rollout"] | float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What one micro-batch adds to the figures of a step: sums over its trained tokens, one maximum."""

    loss: float
    tokens: int
    clipped: float
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
    normalise: Normalise,
    denominator: float,
) -> Tensor:
    """This batch's term of the clipped loss, a scalar; terms of a mini-batch add up to its loss.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob here - the engine's): PPO's
    objective, arXiv 1707.06347. Columns with loss mask 0 have no part in value or gradient.
    """
    # Masked before exp: what stands in a masked column may be anything, and 0 * inf is NaN in the gradient.
    log_ratio_BR = torch.where(batch.loss_mask_BR, logprobs_BR - batch.logprobs_BR, 0.0)
    ratio_BR = log_ratio_BR.exp()
    clipped_BR = ratio_BR.clamp(1 - clip_low, 1 + clip_high)
    gain_BR = torch.minimum(ratio_BR * batch.advantages_BR, clipped_BR * batch.advantages_BR)
    return -weighted_sum(gain_BR, batch.loss_mask_BR, batch.weight_B, normalise) / denominator


@torch.no_grad()
def loss_sums(
    loss: Tensor, logprobs_BR: Tensor, entropy_BR: Tensor, batch: Batch, *, clip_low: float, clip_high: float
) -> LossSums:
    """The figures of one micro-batch; `clipped` counts tokens whose gradient the clip stopped."""
    log_ratio = (logprobs_BR - batch.logprobs_BR)[batch.loss_mask_BR]
    ratio = log_ratio.exp()
    advantage = batch.advantages_BR[batch.loss_mask_BR]
    stopped = ((ratio > 1 + clip_high) & (advantage > 0)) | ((ratio < 1 - clip_low) & (advantage < 0))
    return LossSums(
        loss=float(loss),
        tokens=log_ratio.numel(),
        clipped=float(stopped.sum()),
        kl=float((ratio - 1 - log_ratio).sum()),
        entropy=float(entropy_BR[batch.loss_mask_BR].sum()),
        gap=float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
    )
