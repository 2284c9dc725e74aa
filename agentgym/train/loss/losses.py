"""Policy-gradient losses, which don't depend on how a mini-batch was cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentgym.train.batching.batch import Batch
from agentgym.train.config import Divergence, ImportanceSampling, Loss, LossAgg, TrainConfig
from agentgym.types.sample import Sample

LARGEST_LOG_RATIO = 88.72
"""Largest log-ratio that is used. Its ratio, 3.4e38, is about the largest number in float32.

A larger log-ratio is replaced with this one. Otherwise its ratio would be infinite. If a clip then stopped the
token's gradient, infinity times 0 would be NaN. Ratios that fit into float32 don't change.
"""

LARGEST_K3_GAP = 20.0
"""Distance below the reference, in nats, up to which k3 is exponential. Beyond it, k3 continues as a straight line.

The line's slope is the gradient at that point, 1 - exp(20). A token that the policy has almost ruled out is therefore
pulled back, and no finite log-probability makes a step infinite.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """One micro-batch's contribution to the metrics of a step: sums over its trained tokens, and one maximum."""

    loss: float
    tokens: int
    clipped: float
    """Number of tokens whose gradient was stopped by a clip, or whose weight was clipped."""
    corrected: float
    """Number of tokens whose importance weight was truncated or masked."""
    kl: float
    """Sum of r - 1 - log r over tokens, where r is the probability here divided by the engine's. This is k3 of
    Schulman 2020, "Approximating KL divergence".
    """
    entropy: float
    gap: float
    """Largest |log-probability here - the engine's| of any token, in nats."""
    reference_kl: float = 0.0
    """Sum of the tokens' `divergence` from the reference model."""
    reference_bounded: float = 0.0
    """Number of tokens more than LARGEST_K3_GAP below the reference, for which k3 is a line."""


def denominator(samples: Sequence[Sample], loss_agg: LossAgg) -> float:
    """Return the divisor of a mini-batch's loss: its number of trained tokens, samples or rollouts, or a constant.

    Samples and rollouts without trained tokens don't count.
    """
    if loss_agg == "token":
        return float(sum(int(sample.loss_mask.sum()) for sample in samples))
    if loss_agg == "sample":
        return float(sum(bool(sample.loss_mask.any()) for sample in samples))
    if loss_agg == "rollout":
        return float(len({sample.rollout_id for sample in samples if sample.loss_mask.any()}))
    if isinstance(loss_agg, str) or not loss_agg > 0:
        raise ValueError(f"loss_agg: expected token, sample, rollout or a number above 0, got {loss_agg!r}")
    return float(loss_agg)


def weighted_sum(values_BR: Tensor, loss_mask_BR: Tensor, weight_B: Tensor, loss_agg: LossAgg) -> Tensor:
    """Return the weighted sum over the trained tokens. Divided by `denominator`, it is the mean.

    The weights are::

        token, constant   1
        sample            1 / trained tokens of its sample
        rollout           1 / trained tokens of its rollout     (weight_B / trained tokens of its sample)

    The sums of a batch's parts add up to the sum of the whole batch, so micro-batches, padding and ranks make no
    difference. Merging a segment's turns into one sample makes no difference either, except under "sample", which
    counts samples.
    """
    if loss_agg in ("sample", "rollout"):
        share_B = torch.ones_like(weight_B) if loss_agg == "sample" else weight_B
        values_BR = values_BR * (share_B / loss_mask_BR.sum(-1).clamp(min=1))[:, None]
    return torch.where(loss_mask_BR, values_BR, 0.0).sum()


def policy_loss(
    logprobs_BR: Tensor,
    entropy_BR: Tensor,
    batch: Batch,
    config: TrainConfig,
    *,
    denominator: float,
    sequence_B: Tensor | None = None,
    old_BR: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """Return one micro-batch's term of the policy loss, a scalar, and its metrics.

    The terms of a mini-batch's micro-batches add up to its loss. With r = exp(logprob here - the engine's) of a
    token, A its advantage, and clip(x) = min(max(x, 1 - clip_eps_low), 1 + clip_eps_high)::

        ppo         -min(r A, clip(r) A)                                                    arXiv 1707.06347;
                    clip_eps_high > clip_eps_low: DAPO, arXiv 2503.14476
        dual_clip   the same, at most -dual_clip A if A < 0                                 arXiv 1912.09729
        cispo       value -clip(r) A, gradient -clip(r) A grad(logprob)                     arXiv 2506.13585
        gspo        ppo with s instead of r, s the geometric mean of r over the sample's    arXiv 2507.18071
                    trained tokens (gspo_rollout: over its rollout's); a token has the gradient
                    s grad(its logprob)
        sft         -A logprob here: cross-entropy, A the weight of a demonstrated token

    If `importance_sampling` isn't "none" and `old_BR` is None, the loss (except sft) is replaced by one with the
    weight w that `importance_weights` computes from r: its value is -w A, and its gradient -w A grad(logprob).

    `old_BR` contains log-probabilities of a policy between the engine's and the current one. With it, r and s are
    relative to that policy, and w is computed from exp(old - the engine's). Every loss except sft is then its term
    above times w, which has no gradient. With ppo, this is the decoupled loss of arXiv 2110.00641,
    -w min(r A, clip(r) A).

    `sequence_B` contains log s if a sample isn't the whole sequence over which s is computed. Columns with loss mask
    0 affect neither value nor gradient. No ratio exceeds exp(LARGEST_LOG_RATIO).
    """
    gap_BR = masked_gap(logprobs_BR, batch.logprobs_BR, batch.loss_mask_BR)
    nothing_BR = torch.zeros_like(batch.loss_mask_BR)
    if config.loss == "sft":
        gap_BR = torch.zeros_like(gap_BR)  # demonstrations were not sampled
        term = _Term(gain_BR=logprobs_BR * batch.advantages_BR, stopped_BR=nothing_BR, corrected_BR=nothing_BR)
    elif old_BR is not None:
        clipped = _clip(masked_gap(logprobs_BR, old_BR, batch.loss_mask_BR), batch, config, sequence_B)
        weights_BR, corrected_BR = _correct(masked_gap(old_BR, batch.logprobs_BR, batch.loss_mask_BR), batch, config)
        term = replace(clipped, gain_BR=weights_BR * clipped.gain_BR, corrected_BR=corrected_BR)
    elif config.importance_sampling != "none":
        weights_BR, corrected_BR = _correct(gap_BR.detach(), batch, config)
        gain_BR = weights_BR * _one(gap_BR) * batch.advantages_BR
        term = _Term(gain_BR=gain_BR, stopped_BR=nothing_BR, corrected_BR=corrected_BR)
    else:
        term = _clip(gap_BR, batch, config, sequence_B)
    loss = -weighted_sum(term.gain_BR, batch.loss_mask_BR, batch.weight_B, config.loss_agg) / denominator
    return loss, _metrics(loss, gap_BR, entropy_BR, term, batch.loss_mask_BR)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Term:
    """Each token's term of the objective, which is maximized, and whether the token was clipped or corrected."""

    gain_BR: Tensor
    stopped_BR: Tensor
    """bool: whether a clip stopped the token's gradient or changed its weight."""
    corrected_BR: Tensor
    """bool: whether the token's importance weight was truncated or masked."""


def masked_gap(logprobs_BR: Tensor, others_BR: Tensor, loss_mask_BR: Tensor) -> Tensor:
    """Return the differences of the log-probabilities, 0 for untrained tokens."""
    # Masked before exp, because a masked column may hold any value, and 0 * inf is NaN in the gradient.
    return torch.where(loss_mask_BR, logprobs_BR - others_BR, 0.0)


def _one(log_ratio_BR: Tensor) -> Tensor:
    """Return the value 1 for each token, with the gradient of the token's log-probability."""
    return (log_ratio_BR - log_ratio_BR.detach()).exp()


def _correct(log_ratio_BR: Tensor, batch: Batch, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Return each token's importance weight, and whether it was truncated or masked."""
    cap = config.is_cap
    weights_BR = importance_weights(
        log_ratio_BR, batch.loss_mask_BR, importance_sampling=config.importance_sampling, cap=cap
    )
    return weights_BR, weights_BR == (0 if config.importance_sampling.endswith("mask") else cap)


def _clip(log_ratio_BR: Tensor, batch: Batch, config: TrainConfig, sequence_B: Tensor | None) -> _Term:
    """Return each token's term of a loss that clips its ratio."""
    advantages_BR, one_BR = batch.advantages_BR, _one(log_ratio_BR)
    nothing_BR = torch.zeros_like(batch.loss_mask_BR)
    ratio_BR = _ratio(log_ratio_BR.detach(), batch, config.loss, sequence_B)
    high_BR, low_BR = ratio_BR > 1 + config.clip_eps_high, ratio_BR < 1 - config.clip_eps_low
    if config.loss == "cispo":
        weights_BR = ratio_BR.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
        gain_BR = weights_BR * one_BR * advantages_BR
        return _Term(gain_BR=gain_BR, stopped_BR=high_BR | low_BR, corrected_BR=nothing_BR)
    stopped_BR = high_BR & (advantages_BR > 0) | low_BR & (advantages_BR < 0)
    if config.dual_clip is not None:
        stopped_BR = stopped_BR | (advantages_BR < 0) & (ratio_BR > config.dual_clip)
    gain_BR = _clipped(ratio_BR * one_BR, advantages_BR, config)
    return _Term(gain_BR=gain_BR, stopped_BR=stopped_BR, corrected_BR=nothing_BR)


def _ratio(log_ratio_BR: Tensor, batch: Batch, loss: Loss, sequence_B: Tensor | None) -> Tensor:
    """Return each token's ratio r, or s of its sequence for the gspo losses (see `policy_loss`)."""
    if loss not in ("gspo", "gspo_rollout"):
        return log_ratio_BR.clamp(max=LARGEST_LOG_RATIO).exp()
    if sequence_B is None:
        sequence_B = _sample_mean(log_ratio_BR, batch.loss_mask_BR)
    return sequence_B.clamp(max=LARGEST_LOG_RATIO).exp()[:, None].expand_as(log_ratio_BR)


def _sample_mean(log_ratio_BR: Tensor, loss_mask_BR: Tensor) -> Tensor:
    """Return the mean log-ratio of each sample's trained tokens."""
    return log_ratio_BR.sum(-1) / loss_mask_BR.sum(-1).clamp(min=1)


@torch.no_grad()
def _metrics(loss: Tensor, gap_BR: Tensor, entropy_BR: Tensor, term: _Term, loss_mask_BR: Tensor) -> LossSums:
    """Return the metrics of one micro-batch, copied from the device together.

    `gap_BR`, the distance to the engine, is 0 for untrained tokens.
    """
    gap_BR = gap_BR.double()  # ratios that fit into float32 have a finite sum in float64
    metrics = (
        loss,
        loss_mask_BR.sum(),
        (term.stopped_BR & loss_mask_BR).sum(),
        (term.corrected_BR & loss_mask_BR).sum(),
        (gap_BR.exp() - 1 - gap_BR).sum(),
        torch.where(loss_mask_BR, entropy_BR, 0.0).sum(),
        gap_BR.abs().max(),
    )
    value, tokens, clipped, corrected, kl, entropy, gap = torch.stack([one.double() for one in metrics]).tolist()
    return LossSums(
        loss=value, tokens=int(tokens), clipped=clipped, corrected=corrected, kl=kl, entropy=entropy, gap=gap
    )


def _clipped(ratio_BR: Tensor, advantages_BR: Tensor, config: TrainConfig) -> Tensor:
    """Return the smaller of ratio x advantage and clipped ratio x advantage.

    With dual_clip, the result of a token with a negative advantage is at least dual_clip x advantage.
    """
    clipped_BR = ratio_BR.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    gain_BR = torch.minimum(ratio_BR * advantages_BR, clipped_BR * advantages_BR)
    if config.dual_clip is None:
        return gain_BR
    # Without this bound, a bad token that has become much likelier could have any weight.
    return torch.where(advantages_BR < 0, torch.maximum(gain_BR, config.dual_clip * advantages_BR), gain_BR)


def divergence(logprobs_BR: Tensor, reference_BR: Tensor, loss_mask_BR: Tensor, *, estimator: Divergence) -> Tensor:
    """Return each token's estimate (nats, BR) of the KL divergence from a reference policy, 0 for untrained tokens.

    Here d is the log-probability minus the reference's. The estimators are those of Schulman 2020, "Approximating KL
    divergence"::

        k1   d                  gradient d grad(logprob), as a penalty of d in the reward would have
        k2   d^2 / 2            gradient d grad(logprob)
        k3   exp(-d) - 1 + d    gradient (1 - exp(-d)) grad(logprob); a line below d = -LARGEST_K3_GAP

    On policy, the gradients of k1 and k2 are unbiased estimates of the divergence's gradient, but that of k3 isn't.
    The values of k1 and k3 are unbiased estimates of the divergence. The plain derivative of k1 would be 0 on average
    (arXiv 2506.09477).
    """
    d_BR = torch.where(loss_mask_BR, logprobs_BR - reference_BR, 0.0)
    if estimator == "k1":
        return d_BR.detach() * (d_BR - d_BR.detach()).exp()
    if estimator == "k2":
        return d_BR.square() / 2
    bounded_BR = d_BR.clamp(min=-LARGEST_K3_GAP)
    beyond_BR = bounded_BR - d_BR  # nats below the bound, 0 above it
    return (-bounded_BR).exp() * (1 + beyond_BR) - 1 + d_BR


@torch.no_grad()
def importance_weights(
    log_ratio_BR: Tensor, loss_mask_BR: Tensor, *, importance_sampling: ImportanceSampling, cap: float
) -> Tensor:
    """Return the importance weight of each token, which corrects for the policy that sampled it.

    `log_ratio_BR` must be 0 for untrained tokens. With r the ratio of a token::

        token           min(r, cap)                     truncated: Ionides 2008; arXiv 1802.01561 (IMPALA)
        token_mask      r if 1/cap <= r <= cap, else 0
        sequence        min(R, cap) for each token, R the product of r over the sample's trained tokens
        sequence_mask   R if 1/cap <= R <= cap, else 0
        geometric_mask  r if 1/cap <= g <= cap, else 0, g the geometric mean of r over the sample's trained tokens

    As a sample grows longer, R leaves any range, while g stays on the scale of one token.
    """
    judged_BR = log_ratio_BR
    if importance_sampling in ("sequence", "sequence_mask"):
        judged_BR = log_ratio_BR = log_ratio_BR.sum(-1, keepdim=True).expand_as(log_ratio_BR)
    elif importance_sampling == "geometric_mask":
        judged_BR = _sample_mean(log_ratio_BR, loss_mask_BR)[:, None].expand_as(log_ratio_BR)
    ratio_BR = log_ratio_BR.clamp(max=LARGEST_LOG_RATIO).exp()
    if importance_sampling in ("token", "sequence"):
        return ratio_BR.clamp(max=cap)
    judged_BR = judged_BR.exp()
    return torch.where((judged_BR <= cap) & (judged_BR >= 1 / cap), ratio_BR, 0.0)
