"""Which rollouts made a step that could not be taken."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SHOWN = 20
"""Rollouts that a warning names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchReport:
    """What a micro-batch left behind, on one rank."""

    place: int
    """Its number in the optimizer step; micro-batches of one number are reduced together over the ranks."""
    rollouts: tuple[str, ...]
    """None of a padding batch, which trains nothing."""
    loss_is_finite: bool
    gradient_is_finite: bool
    """Of all micro-batches up to this one, in this rank's shards."""


def gradient_is_finite(weights: Iterable[Tensor]) -> bool:
    """Whether every gradient is, of this rank's shards."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    local = [part.to_local() if isinstance(part, DTensor) else part for part in gradients]
    return math.isfinite(float(torch.nn.utils.get_total_norm(local)))


def nonfinite_rollouts(traces: Sequence[MicroBatchReport]) -> list[str]:
    """The rollouts of the micro-batches, over all ranks, whose loss or gradient was not finite.

    A gradient that is not finite makes all later sums so: the first place is meant. Ranks reduce theirs together, so
    the micro-batches of all ranks at that place are named, unless the loss of one of them tells it apart. Where no
    part was out of bounds and only their norm was, all of them are named.
    """
    blamed = [trace for trace in traces if not trace.loss_is_finite]
    first = min((trace.place for trace in traces if not trace.gradient_is_finite), default=None)
    if first is not None and all(trace.place != first for trace in blamed):
        blamed += [trace for trace in traces if trace.place == first]
    return sorted({name for trace in blamed or traces for name in trace.rollouts})


def warn_skipped(steps: int, rollouts: Sequence[str]) -> None:
    """Say that steps were skipped, and for which rollouts; the same on every rank."""
    names = ", ".join(rollouts[:SHOWN]) + (f" and {len(rollouts) - SHOWN} more" if len(rollouts) > SHOWN else "")
    warnings.warn(
        f"{steps} optimizer step(s) skipped: loss or gradient was not finite in the micro-batches of rollouts {names}",
        RuntimeWarning,
        stacklevel=3,
    )
