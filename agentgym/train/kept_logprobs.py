"""Stores the log-probabilities that a training step computes anyway, so that callers can get them at no cost."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from agentgym.types.arrays import Floats
from agentgym.types.sample import Sample, SampleKey


class ScoredSample(NamedTuple):
    """Log-probabilities of one sample's trained tokens, from a training step's forward pass."""

    logprobs: Floats
    """float32, nats: one number per trained token."""
    moved: bool
    """Whether earlier optimizer steps of the same call had already changed the policy."""


class KeptLogprobs:
    """Collects the log-probabilities of a training step by sample."""

    def __init__(self) -> None:
        self.by_sample: dict[SampleKey, ScoredSample] = {}

    def add(self, rows: Sequence[Sample], logprobs_BR: Tensor, *, moved: bool) -> None:
        """Store the log-probabilities of one micro-batch. They are copied to the CPU in one transfer.

        ::

            logprobs_BR row   0  0  x  x  x      right-aligned: the last len(response_ids) are the sample's
            loss_mask               1  0  1
            stored                  x     x
        """
        scores_BR = logprobs_BR.detach().float().cpu().numpy()
        for row, scores_R in zip(rows, scores_BR, strict=True):
            response = scores_R[len(scores_R) - len(row.response_ids) :]
            self.by_sample[row.rollout_id, row.segment, row.step] = ScoredSample(response[row.loss_mask], moved)
