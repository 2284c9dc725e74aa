"""Policy-gradient losses, indifferent to how their batch was cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from agentgym.train.batch import Batch
from agentgym.types import Sample

Surrogate: TypeAlias = Literal["ppo", "cispo", "gspo", "sft"]
Normalise: TypeAlias = Literal["token", "sample", "rollout"] | float
Correction: TypeAlias = Literal["none", "token", "sequence", "token_mask", "sequence_mask"]
Divergence: TypeAlias = Literal["k1", "k2", "k3"]


class Ratio(TypedDict):
    """What is made of the ratio between this policy and the one that sampled."""

    loss: Surrogate
    clip_low: float
    clip_high: float
    dual_clip: float | None
    correction: Correction
    cap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What one micro-batch adds to the figures of a step: sums over its trained tokens, one maximum."""

    loss: float
    tokens: int
    clipped: float
    """Tokens whose gradient a clip stopped, or whose weight was clipped, truncated or masked."""
    kl: float
    """Sum of r - 1 - log r, r = probability here / engine's: k3 of Schulman 2020, "Approximating KL divergence"."""
    entropy: float
    gap: float
    """Largest |log-probability here - the engine's|, nats."""
    reference_kl: float = 0.0
    """Sum of `divergence` from the reference."""


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
    loss: Surrogate = "ppo",
    dual_clip: float | None = None,
    correction: Correction = "none",
    cap: float = 2.0,
    sequence_B: Tensor | None = None,
    normalise: Normalise,
    denominator: float,
) -> Tensor:
    """This batch's term of the policy loss, a scalar; terms of a mini-batch add up to its loss.

    With r = exp(logprob here - the engine's) of a token, A its advantage, clip(x) = min(max(x, 1 - clip_low),
    1 + clip_high), and sg(x) the value of x without its gradient::

        ppo         -min(r A, clip(r) A)                    arXiv 1707.06347; clip_high > clip_low: DAPO, 2503.14476
        dual_clip   the same, at most -dual_clip A where A < 0                              arXiv 1912.09729
        cispo       -sg(clip(r)) A, its gradient -sg(clip(r)) A grad(logprob)               arXiv 2506.13585
        gspo        ppo with s in the place of r, s the geometric mean of r over the row's  arXiv 2507.18071
                    trained tokens; a token has the gradient s grad(its logprob)
        sft         -A logprob here: cross-entropy, A the weight of a demonstrated token
        correction  -w A, its gradient -w A grad(logprob)                                   `importance_weights`

    `sequence_B` holds log s where a row is not the whole sequence that s is of. Columns with loss mask 0 have no
    part in value or gradient.
    """
    log_ratio_BR = _log_ratio(logprobs_BR, batch)
    one_BR = (log_ratio_BR - log_ratio_BR.detach()).exp()  # 1, with the gradient of the log-probability
    if correction != "none":
        weights_BR = importance_weights(log_ratio_BR, correction=correction, cap=cap)
        gain_BR = weights_BR * one_BR * batch.advantages_BR
    elif loss == "sft":
        gain_BR = logprobs_BR * batch.advantages_BR
    elif loss == "cispo":
        weights_BR = log_ratio_BR.detach().exp().clamp(1 - clip_low, 1 + clip_high)
        gain_BR = weights_BR * one_BR * batch.advantages_BR
    else:
        ratio_BR = _ratio(log_ratio_BR, batch, loss, sequence_B) * one_BR
        gain_BR = _clipped(ratio_BR, batch.advantages_BR, clip_low, clip_high, dual_clip)
    return -weighted_sum(gain_BR, batch.loss_mask_BR, batch.weight_B, normalise) / denominator


def _log_ratio(logprobs_BR: Tensor, batch: Batch) -> Tensor:
    """Log-probability here less the engine's, 0 where nothing is trained."""
    # Masked before exp: what stands in a masked column may be anything, and 0 * inf is NaN in the gradient.
    return torch.where(batch.loss_mask_BR, logprobs_BR - batch.logprobs_BR, 0.0)


@torch.no_grad()
def _ratio(log_ratio_BR: Tensor, batch: Batch, loss: Surrogate, sequence_B: Tensor | None) -> Tensor:
    """r of each token, or s of its sequence."""
    if loss == "gspo":
        own_B = log_ratio_BR.sum(-1) / batch.loss_mask_BR.sum(-1).clamp(min=1)
        return (own_B if sequence_B is None else sequence_B).exp()[:, None].expand_as(log_ratio_BR)
    return log_ratio_BR.exp()


def _clipped(
    ratio_BR: Tensor, advantages_BR: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """The pessimistic one of the ratio and the clipped ratio, times the advantage."""
    clipped_BR = ratio_BR.clamp(1 - clip_low, 1 + clip_high)
    gain_BR = torch.minimum(ratio_BR * advantages_BR, clipped_BR * advantages_BR)
    if dual_clip is None:
        return gain_BR
    # A bad token that has become much likelier would otherwise weigh without bound.
    return torch.where(advantages_BR < 0, torch.maximum(gain_BR, dual_clip * advantages_BR), gain_BR)


def divergence(logprobs_BR: Tensor, reference_BR: Tensor, loss_mask_BR: Tensor, *, estimator: Divergence) -> Tensor:
    """Each trained token's estimate (nats, BR) of the KL divergence from a reference policy; 0 where not trained.

    With d = logprob here - the reference's, and the estimators of Schulman 2020, "Approximating KL divergence"::

        k1   d                  gradient d grad(logprob), as a penalty of d in the reward has it
        k2   d^2 / 2            gradient d grad(logprob)
        k3   exp(-d) - 1 + d    gradient (1 - exp(-d)) grad(logprob)

    On policy, k1 and k2 have the gradient of the divergence and k3 does not, while k1 and k3 are unbiased as values;
    k1 differentiated as it stands would be 0 on average (arXiv 2506.09477).
    """
    d_BR = torch.where(loss_mask_BR, logprobs_BR - reference_BR, 0.0)
    if estimator == "k1":
        return d_BR.detach() * (d_BR - d_BR.detach()).exp()
    if estimator == "k2":
        return d_BR.square() / 2
    return (-d_BR).exp() - 1 + d_BR


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
    loss_value: Tensor,
    logprobs_BR: Tensor,
    entropy_BR: Tensor,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    loss: Surrogate = "ppo",
    dual_clip: float | None = None,
    correction: Correction = "none",
    cap: float = 2.0,
    sequence_B: Tensor | None = None,
) -> LossSums:
    """The figures of one micro-batch."""
    mask_BR = batch.loss_mask_BR
    # Nobody sampled a demonstration: there is no ratio.
    log_ratio_BR = torch.zeros_like(logprobs_BR) if loss == "sft" else _log_ratio(logprobs_BR, batch)
    if correction != "none":
        weights_BR = importance_weights(log_ratio_BR, correction=correction, cap=cap)
        stopped_BR = (weights_BR == 0) | (weights_BR == cap)
    else:
        ratio_BR = _ratio(log_ratio_BR, batch, loss, sequence_B)
        high_BR, low_BR = ratio_BR > 1 + clip_high, ratio_BR < 1 - clip_low
        good_BR, bad_BR = batch.advantages_BR > 0, batch.advantages_BR < 0
        stopped_BR = high_BR | low_BR if loss == "cispo" else high_BR & good_BR | low_BR & bad_BR
        if dual_clip is not None:
            stopped_BR = stopped_BR | (bad_BR & (ratio_BR > dual_clip))
    log_ratio = log_ratio_BR[mask_BR]
    return LossSums(
        loss=float(loss_value),
        tokens=log_ratio.numel(),
        clipped=float(stopped_BR[mask_BR].sum()),
        kl=float((log_ratio.exp() - 1 - log_ratio).sum()),
        entropy=float(entropy_BR[mask_BR].sum()),
        gap=float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
    )
