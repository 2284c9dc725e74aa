"""Samples to tensors: one left-padded block, as wide as the longest sample and no wider."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from agentgym.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B samples in one left-padded block: the last column is real in every row, no token is cut.

    T = max over rows of prompt + response (never max + max), R = longest response::

        input_ids_BT      0  0  P  P  a  a          P P | a a            R = 3
                          P  P  P  e  e  a          P P P | e e a        T = 6
        attention_BT      0  0  1  1  1  1
                          1  1  1  1  1  1
        positions_BT      0  0  0  1  2  3
                          0  1  2  3  4  5
        loss_mask_BR               0  1  1          right-aligned, as logprobs_BR and advantages_BR are:
                                   0  0  1          column j is the id in column T-R+j of input_ids_BT

    The log-probability of column j of BR is read from the hidden state of column T-R+j-1, so the hidden
    states of all responses are `[:, -R-1:-1]`; T > R because no prompt is empty.
    """

    input_ids_BT: Tensor
    """int64."""
    attention_BT: Tensor
    """bool, true where there is a token."""
    loss_mask_BR: Tensor
    """bool, true where a token is trained."""
    logprobs_BR: Tensor
    """float32, nats: the engine's, 0 where nothing is trained."""
    advantages_BR: Tensor
    """float32, 0 where nothing is trained."""
    weight_B: Tensor
    """float32, each sample's share of its rollout's trained tokens."""

    @property
    def positions_BT(self) -> Tensor:
        """int64, counting each row's tokens from 0; 0 on padding."""
        return (self.attention_BT.cumsum(-1) - 1).clamp(min=0)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def __len__(self) -> int:
        return len(self.input_ids_BT)


def collate(samples: Sequence[Sample], *, pad_id: int, max_tokens: int | None = None, masked: bool = False) -> Batch:
    """The samples as one Batch, in their order; nothing is cut and no input is changed.

    A sample of more than `max_tokens` tokens is kept and warned about. `masked` turns the loss mask off:
    a padding batch, which is computed so that ranks stay in step, and trains nothing.
    Raises ValueError for no samples.
    """
    if not samples:
        raise ValueError("samples: none to collate; an empty batch has no shape")
    length_B = np.array([len(row) for row in samples])
    response_B = np.array([len(row.response_ids) for row in samples])
    rows, width, tail = len(samples), int(length_B.max()), int(response_B.max())
    _warn_long(length_B, max_tokens)
    ids_BT = np.full((rows, width), pad_id, np.int64)
    mask_BR = np.zeros((rows, tail), np.bool_)
    logprobs_BR = np.zeros((rows, tail), np.float32)
    advantages_BR = np.zeros((rows, tail), np.float32)
    for i, row in enumerate(samples):
        n = len(row.response_ids)
        ids_BT[i, width - len(row) : width - n] = row.prompt_ids
        ids_BT[i, width - n :] = row.response_ids
        if masked:
            continue
        mask = row.loss_mask
        mask_BR[i, tail - n :] = mask
        np.copyto(logprobs_BR[i, tail - n :], row.logprobs, where=mask)
        np.copyto(advantages_BR[i, tail - n :], row.advantages, where=mask)
    return Batch(
        input_ids_BT=torch.from_numpy(ids_BT),
        attention_BT=torch.from_numpy(np.arange(width) >= (width - length_B)[:, None]),
        loss_mask_BR=torch.from_numpy(mask_BR),
        logprobs_BR=torch.from_numpy(logprobs_BR),
        advantages_BR=torch.from_numpy(advantages_BR),
        weight_B=torch.tensor([row.weight for row in samples], dtype=torch.float32),
    )


def _warn_long(length_B: np.ndarray, max_tokens: int | None) -> None:
    if max_tokens is None or not (length_B > max_tokens).any():
        return
    over, longest = int((length_B > max_tokens).sum()), int(length_B.max())
    warnings.warn(f"{over} samples are over {max_tokens} tokens, the longest has {longest}; none is cut", stacklevel=3)
