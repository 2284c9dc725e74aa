"""Tensors of a micro-batch: the inputs of the forward pass in a layout, and the tensors of the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentgym.train.batching.layouts import Inputs, Layout, lay_out
from agentgym.types.arrays import Ints, require_ids
from agentgym.types.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B samples as tensors. The inputs of the forward pass depend on the layout, but the tensors of the loss don't.

    R is the length of the longest response. The tensors of the loss are right-aligned, with one row per sample::

        responses         a  a                      e  e  a         (a sampled, e from the env)
        loss_mask_BR      0  1  1                   0  0  1
        logprobs_BR       0 -x -x                   0  0 -x          advantages_BR likewise
    """

    inputs: Inputs
    """The tokens of the forward pass, in one of the layouts."""
    loss_mask_BR: Tensor
    """bool: true for trained tokens."""
    logprobs_BR: Tensor
    """float32, nats: log-probability of each token in the engine that sampled it; 0 for untrained tokens."""
    advantages_BR: Tensor
    """float32: advantage of each token; 0 for untrained tokens."""
    weight_B: Tensor
    """float32: each sample's share of its rollout's trained tokens."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on another device."""
        return replace(
            self,
            inputs=self.inputs.on(device),
            loss_mask_BR=self.loss_mask_BR.to(device, non_blocking=True),
            logprobs_BR=self.logprobs_BR.to(device, non_blocking=True),
            advantages_BR=self.advantages_BR.to(device, non_blocking=True),
            weight_B=self.weight_B.to(device, non_blocking=True),
        )

    def __len__(self) -> int:
        return len(self.weight_B)


def collate(
    samples: Sequence[Sample],
    *,
    pad_id: int,
    layout: Layout = "padded",
    masked: bool = False,
) -> Batch:
    """Combine the samples into one Batch, in order. Nothing is truncated, and no sample is changed.

    Args:
        samples: At least one sample.
        pad_id: Id of padding tokens.
        layout: Layout of the forward pass.
        masked: Whether to leave all tokens untrained. Such a batch teaches nothing, but lets a rank run as many
            forward passes as the others.

    Raises:
        ValueError: If there are no samples, or if token ids are invalid. The message names the sample and the field.
    """
    if not samples:
        raise ValueError("samples: nothing to collate; pass at least one sample")
    for sample in samples:
        _require_ids(sample)
    shape = (len(samples), max(len(sample.response_ids) for sample in samples))
    mask_BR = np.zeros(shape, np.bool_)
    logprobs_BR = np.zeros(shape, np.float32)
    advantages_BR = np.zeros(shape, np.float32)
    for i, sample in enumerate(samples if not masked else ()):
        mask, start = sample.loss_mask, shape[1] - len(sample.response_ids)
        mask_BR[i, start:] = mask
        np.copyto(logprobs_BR[i, start:], sample.logprobs, where=mask)
        np.copyto(advantages_BR[i, start:], sample.advantages, where=mask)
    return Batch(
        inputs=lay_out(samples, layout=layout, pad_id=pad_id, masked=masked),
        loss_mask_BR=torch.from_numpy(mask_BR),
        logprobs_BR=torch.from_numpy(logprobs_BR),
        advantages_BR=torch.from_numpy(advantages_BR),
        weight_B=torch.tensor([sample.weight for sample in samples], dtype=torch.float32),
    )


def _require_ids(sample: Sample) -> None:
    try:
        require_ids("prompt_ids", sample.prompt_ids)
        require_ids("response_ids", sample.response_ids)
    except ValueError as error:
        where = f"rollout {sample.rollout_id!r}, segment {sample.segment}, step {sample.step}"
        raise ValueError(f"samples: {where}: {error}") from None


def scored_sample(token_ids: Sequence[int] | Ints) -> Sample:
    """Return a sample of these ids that trains (and so scores) every id except the first.

    Raises:
        ValueError: If there are fewer than two ids.
    """
    ids = np.asarray(token_ids, np.int64)
    if len(ids) < 2:
        raise ValueError(f"token_ids: expected at least 2, got {len(ids)}; the first id has no log-probability")
    n = len(ids) - 1
    return Sample(
        group_id="score",
        rollout_id="score",
        segment=0,
        step=0,
        prompt_ids=ids[:1],
        response_ids=ids[1:],
        loss_mask=np.ones(n, np.bool_),
        logprobs=np.zeros(n, np.float32),
        advantages=np.zeros(n, np.float32),
        weight=1.0,
    )
