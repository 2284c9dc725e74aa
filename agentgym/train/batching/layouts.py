"""The forward side of a micro-batch: which tokens are computed, and which of their states predict trained ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentgym.train.batching.prefix_tree import PrefixTree, build_prefix_tree, pack
from agentgym.train.policy.attention import row_attention
from agentgym.types import Bools, Ints, Sample

Layout: TypeAlias = Literal["padded", "packed", "tree"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetIndex:
    """N log-probabilities to compute, and the M trained tokens of the samples that they belong to.

    N = M where no token is shared; under `tree` samples that train the same token in the same context share one::

        samples        P a b     P a c      trained: a b, a c        place_M    0  1  0  2
        row            P a b c              source_N, target_N       P>a  a>b  a>c
    """

    source_N: Tensor
    """int64: the hidden state that predicts, an index into the flattened B x T."""
    target_N: Tensor
    """int64: the id that it predicts."""
    place_M: Tensor
    """int64: which of the N each trained token is, samples in order, tokens from left to right."""

    def on(self, device: torch.device | str) -> "TargetIndex":
        """The same on another device."""
        source, target, place = (t.to(device, non_blocking=True) for t in (self.source_N, self.target_N, self.place_M))
        return TargetIndex(source_N=source, target_N=target, place_M=place)

    def scatter_to_samples(self, values_N: Tensor, loss_mask_BR: Tensor) -> Tensor:
        """The values in the samples' own places, 0 where nothing is trained; a shared value's gradient is summed."""
        zeros_BR = values_N.new_zeros(loss_mask_BR.shape)
        return zeros_BR.masked_scatter(loss_mask_BR, values_N.index_select(0, self.place_M))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedInputs:
    """A left-padded block, one row per sample: the last column is real in every row, no token is cut.

    T = max over rows of prompt + response (never max + max), R = longest response::

        input_ids_BT      0  0  P  P  a  a          P P | a a            R = 3
                          P  P  P  e  e  a          P P P | e e a        T = 6
        attention_BT      0  0  1  1  1  1
                          1  1  1  1  1  1
        positions_BT      0  0  0  1  2  3
                          0  1  2  3  4  5

    Column j of a tensor that is R wide belongs to the id in column T-R+j, and is predicted by the state before it.
    """

    input_ids_BT: Tensor
    """int64."""
    attention_BT: Tensor
    """bool, true where there is a token."""
    trained: TargetIndex
    tokens: int
    """Real tokens, without the padding."""

    @property
    def positions_BT(self) -> Tensor:
        """int64, counting each row's tokens from 0; 0 on padding."""
        return (self.attention_BT.cumsum(-1) - 1).clamp(min=0)

    def arguments(self) -> dict[str, Any]:
        """What the decoder is called with."""
        return {
            "input_ids": self.input_ids_BT,
            "attention_mask": self.attention_BT,
            "position_ids": self.positions_BT,
        }

    def on(self, device: torch.device | str) -> "PaddedInputs":
        """The same on another device."""
        return replace(
            self,
            input_ids_BT=self.input_ids_BT.to(device, non_blocking=True),
            attention_BT=self.attention_BT.to(device, non_blocking=True),
            trained=self.trained.on(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedInputs:
    """One row without padding: samples side by side, or a forest in which each shared prefix stands once.

    ::

        packed        P P a | P P P e e a         tree (of P P a and P P b c)     P P a b c
        positions     0 1 2 | 0 1 2 3 4 5                                         0 1 2 2 3
        end_T         3 3 3 | 9 9 9 9 9 9                                         5 5 3 5 5

    The token at q attends to every k with `k <= q < end_T[k]`: all before it in its sample, and nothing else.
    """

    input_ids_BT: Tensor
    """int64, B = 1."""
    positions_BT: Tensor
    """int64: where the token stands in its samples, from 0."""
    end_T: Ints
    """One past the last token that sees this one."""
    trained: TargetIndex
    tokens: int
    """All of them are real."""

    def arguments(self) -> dict[str, Any]:
        """What the decoder is called with, after `attention.attend_in_rows`."""
        device = self.input_ids_BT.device
        return {"input_ids": self.input_ids_BT, "position_ids": self.positions_BT} | row_attention(self.end_T, device)

    def on(self, device: torch.device | str) -> "PackedInputs":
        """The same on another device."""
        return replace(
            self,
            input_ids_BT=self.input_ids_BT.to(device, non_blocking=True),
            positions_BT=self.positions_BT.to(device, non_blocking=True),
            trained=self.trained.on(device),
        )


Inputs: TypeAlias = PaddedInputs | PackedInputs


def lay_out(samples: Sequence[Sample], *, layout: Layout, pad_id: int, masked: bool = False) -> Inputs:
    """The samples in this layout; `masked`, none of their tokens is trained. No input is changed."""
    mask = np.concatenate([row.loss_mask for row in samples])
    if masked:
        mask = np.zeros_like(mask)
    if layout == "padded":
        return _padded(samples, mask, pad_id)
    if layout == "packed":
        return _row(pack(samples), mask)
    if layout == "tree":
        return _row(build_prefix_tree(samples), mask)
    raise ValueError(f"layout: {layout!r} is none of padded, packed, tree")


def _padded(samples: Sequence[Sample], mask: Bools, pad_id: int) -> PaddedInputs:
    length_B = np.array([len(row) for row in samples])
    response_B = np.array([len(row.response_ids) for row in samples])
    rows, width = len(samples), int(length_B.max())
    ids_BT = np.full((rows, width), pad_id, np.int64)
    for ids_T, row in zip(ids_BT, samples, strict=True):
        ids_T[width - len(row) : width - len(row.response_ids)] = row.prompt_ids
        ids_T[width - len(row.response_ids) :] = row.response_ids
    # Row i's responses end where the row does, and the samples' responses before it are skipped in counting.
    ends = np.arange(1, rows + 1) * width - response_B.cumsum()
    token_M = (np.arange(len(mask)) + ends.repeat(response_B))[mask]
    return PaddedInputs(
        input_ids_BT=torch.from_numpy(ids_BT),
        attention_BT=torch.from_numpy(np.arange(width) >= (width - length_B)[:, None]),
        trained=_trained(token_M - 1, ids_BT.reshape(-1)[token_M], np.arange(len(token_M))),
        tokens=int(length_B.sum()),
    )


def _row(forest: PrefixTree, mask: Bools) -> PackedInputs:
    node_M = forest.responses[mask]
    trained_T = np.zeros(len(forest), np.bool_)
    trained_T[node_M] = True
    node_N = np.flatnonzero(trained_T)
    return PackedInputs(
        input_ids_BT=torch.from_numpy(forest.token_ids_T)[None],
        positions_BT=torch.from_numpy(forest.depth_T)[None],
        end_T=forest.end_T,
        trained=_trained(forest.parent_T[node_N], forest.token_ids_T[node_N], (trained_T.cumsum() - 1)[node_M]),
        tokens=len(forest),
    )


def _trained(source_N: Ints, target_N: Ints, place_M: Ints) -> TargetIndex:
    return TargetIndex(
        source_N=torch.from_numpy(source_N), target_N=torch.from_numpy(target_N), place_M=torch.from_numpy(place_M)
    )
