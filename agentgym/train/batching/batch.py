"""Samples to tensors: what a layout computes, and what the loss needs of each response token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentgym.train.batching.layouts import Inputs, Layout, lay_out
from agentgym.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B samples: the tokens to compute in one of the layouts, and the same tensors for the loss in each of them.

    R = longest response; the loss's tensors are right-aligned, one row per sample::

        responses         a  a                      e  e  a
        loss_mask_BR      0  1  1                   0  0  1
        logprobs_BR       0 -x -x                   0  0 -x          advantages_BR likewise
    """

    inputs: Inputs
    """What the forward takes."""
    loss_mask_BR: Tensor
    """bool, true where a token is trained."""
    logprobs_BR: Tensor
    """float32, nats: the engine's, 0 where nothing is trained."""
    advantages_BR: Tensor
    """float32, 0 where nothing is trained."""
    weight_B: Tensor
    """float32, each sample's share of its rollout's trained tokens."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
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
    """The samples as one Batch, in their order; nothing is cut and no input is changed.

    `masked` turns the loss mask off: a padding batch, which is computed so that ranks stay in step, and trains nothing.
    Raises ValueError for no samples.
    """
    if not samples:
        raise ValueError("samples: none to collate; an empty batch has no shape")
    rows, tail = len(samples), max(len(row.response_ids) for row in samples)
    mask_BR = np.zeros((rows, tail), np.bool_)
    logprobs_BR = np.zeros((rows, tail), np.float32)
    advantages_BR = np.zeros((rows, tail), np.float32)
    for i, row in enumerate(samples if not masked else ()):
        mask, start = row.loss_mask, tail - len(row.response_ids)
        mask_BR[i, start:] = mask
        np.copyto(logprobs_BR[i, start:], row.logprobs, where=mask)
        np.copyto(advantages_BR[i, start:], row.advantages, where=mask)
    return Batch(
        inputs=lay_out(samples, layout=layout, pad_id=pad_id, masked=masked),
        loss_mask_BR=torch.from_numpy(mask_BR),
        logprobs_BR=torch.from_numpy(logprobs_BR),
        advantages_BR=torch.from_numpy(advantages_BR),
        weight_B=torch.tensor([row.weight for row in samples], dtype=torch.float32),
    )
