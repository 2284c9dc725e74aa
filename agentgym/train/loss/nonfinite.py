"""The search for the rollouts that made a step's loss or gradient infinite or NaN."""

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentgym.train.loss.metrics import Forward

SHOWN = 20
"""Maximum number of rollouts that a warning names."""


def gradient_is_finite(weights: Iterable[Tensor]) -> bool:
    """Return whether all gradients in this rank's shards are finite."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    local = [part.to_local() if isinstance(part, DTensor) else part for part in gradients]
    return math.isfinite(float(torch.nn.utils.get_total_norm(local)))


def nonfinite_rollouts(forwards: Sequence[Forward], step: int) -> list[str]:
    """Return the rollouts that made a step's loss or gradient infinite or NaN, as far as this can be determined.

    Every micro-batch whose loss isn't finite is a cause. Gradients accumulate: once their sum isn't finite, it stays
    so. The first micro-batch after which the sum isn't finite is therefore a cause too. Ranks reduce their gradients
    together, so all ranks' micro-batches with that index count as causes, except if the loss of one of them isn't
    finite and explains it. If all gradients were finite and only their norm wasn't, all of the step's rollouts are
    returned.
    """
    reports = [forward for forward in forwards if forward.step == step]
    blamed = [report for report in reports if not math.isfinite(report.sums.loss)]
    first = min((report.number for report in reports if not report.gradient_is_finite), default=None)
    if first is not None and all(report.number != first for report in blamed):
        blamed += [report for report in reports if report.number == first]
    return sorted({name for report in blamed or reports for name in report.rollouts})


def warn_skipped(steps: int, rollouts: Sequence[str]) -> None:
    """Warn that steps were skipped, and name the rollouts that caused it. The warning is the same on every rank."""
    names = ", ".join(rollouts[:SHOWN]) + (f" and {len(rollouts) - SHOWN} more" if len(rollouts) > SHOWN else "")
    warnings.warn(
        f"{steps} optimizer step(s) skipped: loss or gradient was not finite in the micro-batches of rollouts {names}",
        RuntimeWarning,
        stacklevel=3,
    )
