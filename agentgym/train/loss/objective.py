"""The configured loss of a mini-batch, over any number of micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentgym.train.batching.batch import Batch
from agentgym.train.config import WHOLE_SEGMENTS, TrainConfig
from agentgym.train.loss.losses import (
    LARGEST_K3_GAP,
    LossSums,
    divergence,
    masked_gap,
    policy_loss,
    weighted_sum,
)
from agentgym.train.loss.token_loss import TokenLoss
from agentgym.types.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of one mini-batch: the sum of its micro-batches' terms.

    The sum doesn't depend on how the mini-batch is cut into micro-batches.
    """

    config: TrainConfig
    denominator: float
    """Divisor of the sum over the mini-batch (see `losses.denominator`)."""
    sequences: Mapping[str, float] | None = None
    """For the loss gspo_rollout, the logarithm of each rollout's sequence ratio, by rollout id; None for other
    losses.
    """

    def __call__(
        self,
        samples: Sequence[Sample],
        batch: Batch,
        logprobs_BR: Tensor,
        entropy_BR: Tensor,
        reference_BR: Tensor | None,
        old_BR: Tensor | None,
    ) -> tuple[Tensor, LossSums]:
        """Return these samples' term of the loss, a scalar on which `backward` can be called, and its metrics.

        `reference_BR` contains the log-probabilities of the reference model. `old_BR` contains those of the trainer's
        policy before the batch's first optimizer step. Each is None if the config doesn't need it.
        """
        config, mask_BR = self.config, batch.loss_mask_BR
        loss, sums = policy_loss(
            logprobs_BR,
            entropy_BR,
            batch,
            config,
            denominator=self.denominator,
            sequence_B=self._sequence(samples, logprobs_BR),
            old_BR=old_BR,
        )
        if reference_BR is None:
            return loss, sums
        kl_BR = divergence(logprobs_BR, reference_BR, mask_BR, estimator=config.kl_estimator)
        mean = weighted_sum(kl_BR, mask_BR, batch.weight_B, config.loss_agg) / self.denominator
        loss = loss + config.kl_coef * mean
        bounded_BR = mask_BR & (reference_BR - logprobs_BR.detach() > LARGEST_K3_GAP)
        return loss, replace(
            sums,
            loss=float(loss.detach()),
            reference_kl=float(kl_BR.detach().sum()),
            reference_bounded=float(bounded_BR.sum()),
        )

    def by_token(self, batch: Batch, loss: Callable[[Tensor, Tensor], tuple[Tensor, LossSums]]) -> TokenLoss | None:
        """Return the loss as a `TokenLoss`, or None if the config needs a ratio over a whole segment.

        In a `TokenLoss`, each token's gradient depends only on that token's log-probability, which ratios over a
        segment (`WHOLE_SEGMENTS`) make impossible. A token whose advantage is 0 gets a gradient only from the
        divergence.

        Args:
            batch: The micro-batch.
            loss: Returns the micro-batch's term of the loss and its metrics, given log-probabilities and entropies
                ([B, R]).
        """
        config = self.config
        if config.loss in WHOLE_SEGMENTS or config.importance_sampling in WHOLE_SEGMENTS:
            return None
        possible_BR = batch.loss_mask_BR if config.kl_coef else batch.advantages_BR != 0
        return TokenLoss(
            term=lambda logprobs_BR: loss(logprobs_BR, torch.zeros_like(logprobs_BR))[0], possible_BR=possible_BR
        )

    def _sequence(self, samples: Sequence[Sample], like: Tensor) -> Tensor | None:
        """Return the log of each sample's rollout ratio, or None if the loss has no ratio per rollout."""
        if self.sequences is None:
            return None
        ratios = [self.sequences[sample.rollout_id] for sample in samples]
        return torch.tensor(ratios, dtype=like.dtype, device=like.device)


@torch.no_grad()
def sample_log_ratios(
    samples: Sequence[Sample], batch: Batch, logprobs_BR: Tensor, old_BR: Tensor | None = None
) -> list[tuple[str, float, int]]:
    """Return each sample's rollout id, sum of log-ratios over trained tokens, and number of trained tokens.

    The ratios are relative to `old_BR`, or to the engine's log-probabilities if it is None.
    """
    others_BR = batch.logprobs_BR if old_BR is None else old_BR
    log_ratio_BR = masked_gap(logprobs_BR, others_BR, batch.loss_mask_BR).double()
    sums, counts = log_ratio_BR.sum(-1).tolist(), batch.loss_mask_BR.sum(-1).tolist()
    return [(sample.rollout_id, total, count) for sample, total, count in zip(samples, sums, counts, strict=True)]


def rollout_log_ratios(parts: Sequence[tuple[str, float, int]]) -> dict[str, float]:
    """Return the mean log-ratio of each rollout's trained tokens, by rollout id.

    `parts` is the result of `sample_log_ratios`.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, total, count in parts:
        sums[name] = sums.get(name, 0.0) + total
        counts[name] = counts.get(name, 0) + count
    return {name: total / max(counts[name], 1) for name, total in sums.items()}


def refuse_parts(config: TrainConfig, samples: Sequence[Sample]) -> None:
    """Raise ValueError if the loss needs whole segments and a segment is cut into several samples."""
    segments = {(sample.rollout_id, sample.segment) for sample in samples}
    if len(segments) == len(samples):
        return
    for field, value in (("loss", config.loss), ("importance_sampling", config.importance_sampling)):
        if value in WHOLE_SEGMENTS:
            raise ValueError(
                f"{field}: {value} needs each segment whole in one sample, but {len(segments)} segments were cut into "
                f"{len(samples)} samples; use build_samples(merge=True), or set {WHOLE_SEGMENTS[value]}"
            )
