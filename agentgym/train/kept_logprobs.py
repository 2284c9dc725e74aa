"""The log-probabilities that a training step computes anyway, kept for whoever asks for them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from agentgym.types.arrays import Floats
from agentgym.types.sample import Sample, SampleKey


class ScoredSample(NamedTuple):
    """What a step's forward gave the trained tokens of one sample."""

    logprobs: Floats
    """One float32 number in nats for each trained token."""
    moved: bool
    """Whether optimizer steps of the same call had changed the policy before."""


class KeptLogprobs:
    """Keeps what a training step gives each sample."""

    def __init__(self) -> None:
        self.by_sample: dict[SampleKey, ScoredSample] = {}

    def add(self, rows: Sequence[Sample], logprobs_BR: Tensor, *, moved: bool) -> None:
        """Keep those of one micro-batch; one copy to the CPU, whatever the number of rows.

        ::

            logprobs_BR row   0  0  x  x  x      right-aligned: the last len(response_ids) are the sample's
            loss_mask               1  0  1
            kept                    x     x
        """
        scores_BR = logprobs_BR.detach().float().cpu().numpy()
        for row, scores_R in zip(rows, scores_BR, strict=True):
            response = scores_R[len(scores_R) - len(row.response_ids) :]
            self.by_sample[row.rollout_id, row.segment, row.step] = ScoredSample(response[row.loss_mask], moved)
