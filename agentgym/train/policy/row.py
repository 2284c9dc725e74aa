"""One row of many samples: which tokens each token may attend to, for attention and for layers with a state."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from agentgym.types.arrays import Ints

MaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A mask function as in transformers: called with batch, head, query and key, it returns whether the query attends to
the key.
"""
CHECKED = 64
"""Maximum number of depths in a row up to which `Row.starts` also compares its result with the layer's mask for every
pair of depths.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """A row of tokens split into unbranched runs, each with the tokens that come before it in its samples.

    In an unbranched run, each token follows the token to its left in every sample that contains it::

        row           P P a b | c          (samples P P a b and P P a c)
        runs          P P a b   c          queries  4 1
        keys          0 1 2 3   0 1 2 4    sizes    4 4
    """

    queries: list[int]
    """Number of tokens in each run."""
    keys: Tensor | None
    """int64: the keys of all runs, one run after the other, as positions in the row. A run's keys are the earlier
    tokens of its samples, then its own tokens. None if the keys are all positions of the row in order.
    """
    sizes: list[int]
    """Number of keys of each run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """The S complete sequences in a block of B x T tokens, each from its first token on, padded at the right.

    Layers with a state need them, because they must compute each sequence separately. L is the length of the longest
    sequence, and N = B x T::

        row           P P a b | c          (samples P P a b and P P a c)
        gather_SL     0 1 2 3              place_N    0 1 2 3 7
                      0 1 2 4
    """

    gather_SL: Tensor
    """int64: for each token of each sequence, its index in the flattened block."""
    place_N: Tensor
    """int64: for each token of the flattened block, its index in the flattened sequences."""
    shape: tuple[int, int]
    """B and T."""

    def spread(self, value: Any) -> Any:
        """Rearrange a tensor from the block's shape to one row per sequence. Anything else is returned unchanged."""
        if not isinstance(value, Tensor) or tuple(value.shape[:2]) != self.shape:
            return value
        return value.flatten(0, 1)[self.gather_SL]

    def collect(self, value: Any) -> Any:
        """Rearrange a tensor from one row per sequence to the block's shape. Anything else is returned unchanged."""
        if not isinstance(value, Tensor) or value.shape[:2] != self.gather_SL.shape:
            return value
        return value.flatten(0, 1)[self.place_N].reshape(*self.shape, *value.shape[2:])


class Row:
    """A row of samples on `device`, in which query q may attend to key k only if `k <= q < end_T[k]`."""

    def __init__(self, end_T: Ints, device: torch.device) -> None:
        self.end_T, self.device = end_T, device
        self.attending: set[nn.Module] | None = None
        """Modules that attended to the row; None if they aren't recorded."""

    @cached_property
    def runs(self) -> Runs:
        """The row as unbranched runs, on the CPU."""
        return runs(self.end_T)

    @cached_property
    def depth_T(self) -> Ints:
        """int64: number of tokens before each token in its samples."""
        change = np.ones(len(self.end_T) + 1, np.int64)
        np.subtract.at(change, self.end_T, 1)
        return change[:-1].cumsum() - 1

    @cached_property
    def sequences(self) -> Sequences:
        """The complete sequences of the row: every path from a first token to one that no other token follows."""
        count, found = self.runs, []
        keys = np.arange(len(self.end_T)) if count.keys is None else count.keys.numpy()
        stops, paths = np.cumsum(count.queries), np.split(keys, np.cumsum(count.sizes)[:-1])
        found = [path for stop, path in zip(stops, paths, strict=True) if self.end_T[stop - 1] == stop]
        gather = np.zeros((len(found), max(map(len, found))), np.int64)
        place = np.zeros(len(self.end_T), np.int64)
        for number, path in enumerate(found):
            gather[number, : len(path)] = path
            place[path] = number * gather.shape[1] + np.arange(len(path))
        return Sequences(
            gather_SL=torch.from_numpy(gather).to(self.device),
            place_N=torch.from_numpy(place).to(self.device),
            shape=(1, len(self.end_T)),
        )

    def starts(self, mask: MaskFunction) -> Ints | None:
        """Return how far back tokens may attend under a layer's mask, or None if the mask sets no limit.

        A token's depth is the number of tokens before it in its sample. Entry d is the depth of the first token that
        a token at depth d attends to. A sliding window is a mask that limits this.

        Raises:
            ValueError: If the mask isn't causal, or if the range of tokens that it allows has gaps.
        """
        depths = int(self.depth_T.max()) + 1
        query, zero = torch.arange(depths, device=self.device), torch.zeros((), dtype=torch.int64, device=self.device)

        def shows(queries: Tensor, keys: Tensor) -> Tensor:
            return torch.as_tensor(mask(zero, zero, queries, keys), device=self.device).expand(queries.shape)

        low, high = torch.zeros_like(query), query.clone()
        for _ in range(depths.bit_length()):
            middle = (low + high) // 2
            shown = shows(query, middle)
            low, high = torch.where(shown, low, torch.minimum(middle + 1, high)), torch.where(shown, middle, high)
        whole = bool(shows(query, query).all()) and not bool(shows(query, query + 1).any())
        if whole and depths <= CHECKED:
            queries, keys = torch.meshgrid(query, query, indexing="ij")
            stretch = (keys <= queries) & (keys >= low[:, None])
            whole = torch.equal(shows(queries.reshape(-1), keys.reshape(-1)), stretch.reshape(-1))
        if not whole:
            raise ValueError(
                "layout: a layer's mask must let a token attend to itself and an unbroken range of tokens right before "
                "it, and to no others"
            )
        starts: Ints = low.cpu().numpy()
        return starts if starts.any() else None


class RowMask:
    """The mask that an attention layer receives: the row, and the layer's own mask for tokens of one sample."""

    def __init__(self, row: Row, mask: MaskFunction | None = None) -> None:
        self.row, self._mask = row, mask
        self.blocks: Any = None
        """FlexAttention's form of the mask, once a layer has used it."""

    @cached_property
    def starts_D(self) -> Ints | None:
        """Result of `Row.starts`, computed on first use, because some models create masks that no layer uses."""
        return None if self._mask is None else self.row.starts(self._mask)


def runs(end_T: Ints) -> Runs:
    """Split a row into its runs.

    A token starts a new run unless the token before it in the row also comes before it in its samples.
    """
    starts = [0, *(np.flatnonzero(end_T[:-1] <= np.arange(1, len(end_T))) + 1).tolist()]
    paths = [np.flatnonzero(end_T[:start] > start) for start in starts]
    spans = list(pairwise([*starts, len(end_T)]))
    queries = [stop - start for start, stop in spans]
    keys = None
    if any(map(len, paths)):
        pieces = [part for path, span in zip(paths, spans, strict=True) for part in (path, np.arange(*span))]
        keys = torch.from_numpy(np.concatenate(pieces))
    return Runs(queries=queries, keys=keys, sizes=[n + len(path) for n, path in zip(queries, paths, strict=True)])


def padded_sequences(attention_BT: Tensor) -> Sequences | None:
    """Return the sequences of a left-padded block, or None if nothing is padded."""
    count, width = attention_BT.shape
    before_B = width - attention_BT.sum(-1)
    if not before_B.any():
        return None
    column = torch.arange(width, device=attention_BT.device)
    first_B = torch.arange(count, device=attention_BT.device) * width
    gather = first_B[:, None] + (column + before_B[:, None]).clamp(max=width - 1)
    place = first_B[:, None] + (column - before_B[:, None]).clamp(min=0)
    return Sequences(gather_SL=gather, place_N=place.reshape(-1), shape=(count, width))


_ROW: ContextVar[Row | None] = ContextVar("row", default=None)
_SEQUENCES: ContextVar[Sequences | None] = ContextVar("sequences", default=None)


def current_row() -> Row | None:
    """Return the row that the current forward pass computes, or None if it doesn't compute a `Row`."""
    return _ROW.get()


def current_sequences() -> Sequences | None:
    """Return the sequences of the block that is being computed, or None if each row of the block is one sequence."""
    row = _ROW.get()
    return _SEQUENCES.get() if row is None else row.sequences


@contextmanager
def _computing(row: Row | None, sequences: Sequences | None) -> Any:
    tokens = _ROW.set(row), _SEQUENCES.set(sequences)
    try:
        yield
    finally:
        _ROW.reset(tokens[0])
        _SEQUENCES.reset(tokens[1])


def computing(row: Row | None, sequences: Sequences | None = None) -> AbstractContextManager[None]:
    """Return a context in which `current_row` and `current_sequences` return these values."""
    context: AbstractContextManager[None] = _computing(row, sequences)
    return context


def as_now() -> AbstractContextManager[None]:
    """Return a context that restores the present row and sequences when gradient checkpointing recomputes a layer."""
    return computing(_ROW.get(), _SEQUENCES.get())
