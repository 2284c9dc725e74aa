"""Inputs of a forward pass in three layouts, and the indices that map its hidden states to the trained tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentgym.train.batching.prefix_tree import PrefixTree, build_prefix_tree, pack
from agentgym.train.policy.attention import row_attention
from agentgym.types.arrays import Bools, Ints
from agentgym.types.sample import Sample

Layout: TypeAlias = Literal["padded", "packed", "tree"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs(ABC):
    """Tokens of a forward pass in one of the layouts, and which of its hidden states predict the trained tokens.

    The tokens are a block of B rows with T tokens each. The pass computes N log-probabilities for the M trained
    tokens. If samples share no token, N = M. Under `tree`, samples that train the same token in the same context
    share one log-probability::

        samples        P a b     P a c      trained: a b, a c        index_M    0  1  0  2
        tree           P a b c              source_N, target_N       P>a  a>b  a>c
    """

    input_ids_BT: Tensor
    """Token ids: int32 if padded, otherwise int64."""
    source_N: Tensor
    """int64: for each of the N log-probabilities, the index of the hidden state that it is computed from, in the
    flattened B x T.
    """
    target_N: Tensor
    """int64: for each of the N log-probabilities, the id of the predicted token."""
    index_M: Tensor
    """int64: for each of the M trained tokens, the index of its log-probability among the N. The tokens are ordered
    by sample, and from left to right.
    """
    tokens: int
    """Number of tokens without padding."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which to call the decoder."""

    def on(self, device: torch.device | str) -> Self:
        """Return the same inputs on another device."""
        moved: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            if isinstance(value := getattr(self, name), Tensor):
                moved[name] = value.to(device, non_blocking=True)
        return replace(self, **moved)

    def scatter_to_samples(self, values_N: Tensor, loss_mask_BR: Tensor) -> Tensor:
        """Arrange N values by sample and response token ([B, R]), with 0 for untrained tokens.

        The gradient of a shared value is the sum over the tokens that share it.
        """
        zeros_BR = values_N.new_zeros(loss_mask_BR.shape)
        return zeros_BR.masked_scatter(loss_mask_BR, values_N.index_select(0, self.index_M))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedInputs(Inputs):
    """A left-padded block with one row per sample. No token is cut, and no row ends with padding.

    T is the length of the longest prompt with its response, R that of the longest response::

        input_ids_BT      0  0  P  P  a  a          P P | a a            R = 3
                          P  P  P  e  e  a          P P P | e e a        T = 6
        start_B           2                         attention_BT and positions_BT are computed from it,
                          0                         on the block's device
        attention_BT      0  0  1  1  1  1
                          1  1  1  1  1  1
        positions_BT      0  0  0  1  2  3
                          0  1  2  3  4  5

    Column j of a tensor of width R belongs to the id in column T-R+j of the block. The hidden state in the column
    before that id predicts it.
    """

    start_B: Tensor
    """int64: column of each row's first token."""

    @property
    def attention_BT(self) -> Tensor:
        """bool: true for tokens, false for padding."""
        return self._columns_T() >= self.start_B[:, None]

    @property
    def positions_BT(self) -> Tensor:
        """int64: position of each token in its sample, from 0, and 0 for padding."""
        return (self._columns_T() - self.start_B[:, None]).clamp_(min=0)

    def _columns_T(self) -> Tensor:
        return torch.arange(self.input_ids_BT.shape[1], device=self.start_B.device)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which to call the decoder."""
        return {
            "input_ids": self.input_ids_BT.long(),
            "attention_mask": self.attention_BT,
            "position_ids": self.positions_BT,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedInputs(Inputs):
    """One row without padding (B = 1): samples side by side, or trees that contain each shared prefix once.

    ::

        packed        P P a | P P P e e a         tree (of P P a and P P b c)     P P a b c
        positions     0 1 2 | 0 1 2 3 4 5                                         0 1 2 2 3
        end_T         3 3 3 | 9 9 9 9 9 9                                         5 5 3 5 5

    The token at q attends to every k with `k <= q < end_T[k]`: to all tokens before it in its sample, and to nothing
    else.
    """

    positions_BT: Tensor
    """int64: position of each token in its samples, counted from 0."""
    end_T: Ints
    """int64: for each token, the index after the last token that attends to it."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which to call a decoder that `opening.attend_in_rows` prepared."""
        device = self.input_ids_BT.device
        return {"input_ids": self.input_ids_BT, "position_ids": self.positions_BT} | row_attention(self.end_T, device)


def lay_out(samples: Sequence[Sample], *, layout: Layout, pad_id: int, masked: bool = False) -> Inputs:
    """Arrange the samples for a forward pass. With `masked`, none of their tokens is trained. No sample is changed."""
    mask = np.concatenate([sample.loss_mask for sample in samples])
    if masked:
        mask = np.zeros_like(mask)
    if layout == "padded":
        return _padded(samples, mask, pad_id)
    if layout == "packed":
        return _packed(pack(samples), mask)
    if layout == "tree":
        return _packed(build_prefix_tree(samples), mask)
    raise ValueError(f"layout: expected padded, packed or tree, got {layout!r}")


def _padded(samples: Sequence[Sample], mask: Bools, pad_id: int) -> PaddedInputs:
    length_B = np.array([len(sample) for sample in samples])
    count, width = len(samples), int(length_B.max())
    # int32 takes half the memory of int64. It is safe, because `collate` rejects ids that don't fit.
    ids_BT = np.empty((count, width), np.int32)
    for ids_T, sample in zip(ids_BT, samples, strict=True):
        response = width - len(sample.response_ids)
        prompt = response - len(sample.prompt_ids)
        ids_T[:prompt] = pad_id
        ids_T[prompt:response] = sample.prompt_ids
        ids_T[response:] = sample.response_ids
    token_M = _trained_tokens(samples, mask, width)
    target_M = ids_BT.reshape(-1)[token_M].astype(np.int64)
    token_M -= 1  # in place: each index is now that of the token before, whose hidden state predicts the target
    return PaddedInputs(
        input_ids_BT=torch.from_numpy(ids_BT),
        start_B=torch.from_numpy(width - length_B),
        source_N=torch.from_numpy(token_M),
        target_N=torch.from_numpy(target_M),
        index_M=torch.arange(len(token_M)),
        tokens=int(length_B.sum()),
    )


def _trained_tokens(samples: Sequence[Sample], mask: Bools, width: int) -> Ints:
    """Return each trained token's index in the flattened block, in which every response ends at the end of its row.

    `mask` tells for all response tokens, sample by sample, whether they are trained. `width` is the length of a row.
    """
    response_B = np.array([len(sample.response_ids) for sample in samples])
    stop_B = response_B.cumsum()
    row_stop_B = np.arange(1, len(samples) + 1) * width
    token_M = np.flatnonzero(mask)
    trained_B = token_M.searchsorted(stop_B) - token_M.searchsorted(stop_B - response_B)
    token_M += (row_stop_B - stop_B).repeat(trained_B)
    return token_M


def _packed(tree: PrefixTree, mask: Bools) -> PackedInputs:
    node_M = tree.responses[mask]
    if (node_M[1:] > node_M[:-1]).all():  # no trained token is shared by two samples
        node_N, index_M = node_M, np.arange(len(node_M))
    else:
        trained_T = np.zeros(len(tree), np.bool_)
        trained_T[node_M] = True
        node_N, index_M = np.flatnonzero(trained_T), (trained_T.cumsum() - 1)[node_M]
    return PackedInputs(
        input_ids_BT=torch.from_numpy(tree.token_ids_T)[None],
        positions_BT=torch.from_numpy(tree.depth_T)[None],
        end_T=tree.end_T,
        source_N=torch.from_numpy(tree.parent_T[node_N]),
        target_N=torch.from_numpy(tree.token_ids_T[node_N]),
        index_M=torch.from_numpy(index_M),
        tokens=len(tree),
    )
