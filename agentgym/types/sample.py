"""A training sample and its key."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from agentgym.types.arrays import Bools, Floats, Ints, require, set_vectors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Sample:
    """A prompt and a response to train on, with the advantage of each response token.

    A sample is identified by its ids, never by its position in a batch. The weights of a rollout's samples sum to 1.
    """

    group_id: str
    rollout_id: str
    segment: int
    step: int
    """Index, within its segment, of the first turn that this sample covers."""
    prompt_ids: Ints
    response_ids: Ints
    loss_mask: Bools
    logprobs: Floats
    advantages: Floats
    weight: float
    """The sample's share of its rollout's trained tokens."""

    def __post_init__(self) -> None:
        set_vectors(
            self,
            prompt_ids=np.int64,
            response_ids=np.int64,
            loss_mask=np.bool_,
            logprobs=np.float32,
            advantages=np.float32,
        )
        n = len(self.response_ids)
        require(len(self.prompt_ids) > 0, "prompt_ids: empty; the first response token needs a context")
        require(n > 0, "response_ids: empty")
        if not len(self.loss_mask) == len(self.logprobs) == len(self.advantages) == n:
            for name in ("loss_mask", "logprobs", "advantages"):
                require(len(getattr(self, name)) == n, f"{name}: got {len(getattr(self, name))} for {n} response_ids")

    def __repr__(self) -> str:
        size = f"{len(self.prompt_ids)} prompt ids, {len(self.response_ids)} response ids"
        return f"<Sample {self.rollout_id} segment {self.segment} step {self.step}: {size}, weight {self.weight:g}>"

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


SampleKey: TypeAlias = tuple[str, int, int]
"""Rollout id, segment and step, which identify a sample."""
