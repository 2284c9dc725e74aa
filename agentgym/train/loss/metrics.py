"""Metrics of a training call, computed from the reports of its forward passes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.train.config import TrainConfig
from agentgym.train.loss.losses import LossSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The report of one micro-batch's forward and backward pass on one rank, from which metrics are computed."""

    step: int
    """Index of the optimizer step within the call, starting at 0."""
    number: int
    """Index of the micro-batch within the optimizer step, starting at 0. The ranks' micro-batches with the
    same index are computed at the same time, and their gradients are reduced together.
    """
    rollouts: tuple[str, ...]
    """Ids of the rollouts trained in this micro-batch; empty for padding."""
    sums: LossSums
    real_tokens: int
    """Number of tokens that the pass computed, without padding."""
    computed_tokens: int
    gradient_is_finite: bool
    """Whether the gradients, accumulated up to this micro-batch in this rank's shards, are finite."""


def step_metrics(forwards: Sequence[Forward], norms: Sequence[float], config: TrainConfig) -> dict[str, float]:
    """Return the metrics of a training call over all ranks, by their names in the log.

    They cover the optimizer steps that were taken or, if none was taken, all steps. But the share of padding and the
    numbers of micro-batches and of unique tokens always cover all steps, and the largest gap to the engine's
    log-probabilities is that of the first step. If no step was taken, the number of trained tokens is 0.

    Args:
        forwards: The reports of all ranks' forward passes.
        norms: Norm of the gradient in each optimizer step.
        config: The settings of the trainer.
    """
    finite = {step for step, norm in enumerate(norms) if math.isfinite(norm)}
    steps = finite or set(range(len(norms)))
    taken = [f for f in forwards if f.step in steps]
    tokens = sum(f.sums.tokens for f in taken)
    real, computed = sum(f.real_tokens for f in forwards), sum(f.computed_tokens for f in forwards)
    metrics = {
        "train/loss": sum(f.sums.loss for f in taken) / len(steps),
        "train/grad_norm": sum(norms[step] for step in steps) / len(steps),
        "train/clip_fraction": sum(f.sums.clipped for f in taken) / tokens,
        "train/kl": sum(f.sums.kl for f in taken) / tokens,
        "train/entropy": sum(f.sums.entropy for f in taken) / tokens,
        # Only the first mini-batch: from the second on, the policy differs from the engine's.
        "train/logprob_gap": max(f.sums.gap for f in forwards if f.step == 0),
        "train/trained_tokens": float(tokens if finite else 0),
        "train/padding": 1 - real / computed,
        "train/micro_batches": float(len(forwards)),
    }
    if config.importance_sampling != "none":
        metrics["train/is_fraction"] = sum(f.sums.corrected for f in taken) / tokens
    if config.kl_coef:
        metrics["train/reference_kl"] = sum(f.sums.reference_kl for f in taken) / tokens
        if config.kl_estimator == "k3":
            metrics["train/reference_kl_bounded"] = sum(f.sums.reference_bounded for f in taken) / tokens
    if config.layout == "tree":
        metrics["train/unique_tokens"] = float(real)
    return metrics
