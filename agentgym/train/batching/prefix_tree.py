"""Samples as a tree of their prefixes, in which each shared token occurs once, laid out in one row.

The row is in depth-first order.

This module needs only NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from agentgym.types.arrays import Ints
from agentgym.types.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """T tokens (the nodes) in one row, depth first. Node q attends to node k if and only if `k <= q < end_T[k]`.

    Samples without a common first token are separate trees, side by side.

    ::

        samples   P P a b           node     0  1  2  3  4  5  6
                  P P a c d         ids      P  P  a  b  c  d  x
                  x                 depth    0  1  2  3  3  4  0
                                    parent  -1  0  1  2  2  4 -1
                                    end      6  6  6  4  6  6  7
    """

    token_ids_T: Ints
    """int64: token id of each node."""
    depth_T: Ints
    """int64: position of each node in its samples, counted from 0."""
    parent_T: Ints
    """int64: for each node, the node of the token before it in its samples; -1 for a sample's first token."""
    end_T: Ints
    """int64: for each node, the index after the last node in its subtree."""
    responses: Ints
    """int64: the nodes of all response tokens, sample by sample in the original order of the samples."""

    def __len__(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedSamples:
    """Samples sorted by their tokens, so that each is next to the one with which it shares the longest prefix.

    ::

        sorted     a b        a b c d    a b e       x y
        lengths    2          4          3           2
        shared     0          2          2           0        of a b | a b c d | a b e: 2 + (4 - 2) + (3 - 2) = 5 unique

    Any run of neighbors forms a tree. Its first sample adds `lengths` tokens to it, and each other sample adds
    `lengths - shared`.
    """

    indices: Ints
    """Index of each sample in the original order."""
    lengths: Ints
    """Number of tokens of each sample, prompt and response."""
    shared: Ints
    """Number of tokens that each sample shares with the sample before it; 0 for the first."""

    @property
    def unique_tokens(self) -> int:
        """Number of tokens in the tree of all samples."""
        return int((self.lengths - self.shared).sum())

    def cuts(self, tokens: int, *, tree_price: int = 0) -> list[tuple[int, int]]:
        """Cut the sorted samples into trees of at most `tokens` unique tokens.

        Returns each tree's start and stop among the sorted samples. A prefix that occurs on both sides of a cut is
        computed twice. The cuts cause as few repeated tokens as possible and, among such cuts, make the fewest trees.
        With a `tree_price` above 0, up to that many tokens may be repeated for each tree that this saves. A sample of
        more than `tokens` tokens gets a separate tree.
        """
        count = len(self.indices)
        before = np.concatenate([[0], (self.lengths - self.shared).cumsum()])
        cost = np.zeros(count + 1, np.int64)  # for the first n samples: repeated tokens, then trees
        start_of = np.zeros(count + 1, np.int64)  # for the first n samples: start of the last tree
        low = 0
        for stop in range(1, count + 1):
            while low < stop - 1 and self.shared[low] + before[stop] - before[low] > tokens:
                low += 1
            costs = cost[low:stop] + (self.shared[low:stop] + tree_price) * (count + 1) + 1
            start_of[stop] = low + costs.argmin()
            cost[stop] = costs.min()
        starts = [count]
        while starts[-1]:
            starts.append(int(start_of[starts[-1]]))
        return list(pairwise(reversed(starts)))


def sort_samples(samples: Sequence[Sample]) -> SortedSamples:
    """Sort the samples by their tokens, and count how many tokens each shares with the one before it."""
    return _sorted([_key(sample) for sample in samples])


def unique_tokens(samples: Sequence[Sample]) -> int:
    """Return the total number of tokens in the samples, counting each shared prefix once."""
    return sort_samples(samples).unique_tokens


def build_prefix_tree(samples: Sequence[Sample]) -> PrefixTree:
    """Build the tree of these samples, with `unique_tokens(samples)` nodes.

    Raises:
        ValueError: If there are no samples.
    """
    if not samples:
        raise ValueError("samples: nothing to build a tree from; pass at least one sample")
    keys = [_key(sample) for sample in samples]
    order = _sorted(keys)
    path = _Path(order.unique_tokens)
    responses: list[Ints] = [order.indices] * len(samples)
    for i, length, shared in zip(order.indices.tolist(), order.lengths.tolist(), order.shared.tolist(), strict=True):
        path.branch(shared, length)
        responses[i] = path.nodes(len(samples[i].prompt_ids))
    path.branch(0, 0)
    added = order.lengths - order.shared
    suffixes = [np.frombuffer(keys[i], "<u4", offset=4 * n) for i, n in zip(order.indices, order.shared, strict=True)]
    return PrefixTree(
        token_ids_T=np.concatenate(suffixes, dtype=np.int64),
        depth_T=np.arange(path.size) + (order.shared - added.cumsum() + added).repeat(added),
        parent_T=path.parent_T,
        end_T=path.end_T,
        responses=np.concatenate(responses),
    )


def pack(samples: Sequence[Sample]) -> PrefixTree:
    """Lay the samples out side by side in the given order, without sharing any token.

    Raises:
        ValueError: If there are no samples.
    """
    if not samples:
        raise ValueError("samples: nothing to lay out; pass at least one sample")
    length_B = np.array([len(sample) for sample in samples])
    response_B = np.array([len(sample.response_ids) for sample in samples])
    stop_B = length_B.cumsum()
    start_B = stop_B - length_B
    parent_T = np.arange(-1, stop_B[-1] - 1)
    parent_T[start_B] = -1
    return PrefixTree(
        token_ids_T=np.concatenate([ids for sample in samples for ids in (sample.prompt_ids, sample.response_ids)]),
        depth_T=_ranges(np.zeros_like(start_B), length_B),
        parent_T=parent_T,
        end_T=stop_B.repeat(length_B),
        responses=_ranges(stop_B - response_B, response_B),
    )


def _ranges(start_B: Ints, length_B: Ints) -> Ints:
    """Return the numbers of all these ranges, given by start and length, as one array."""
    offset_B: Ints = start_B + length_B - length_B.cumsum()
    return np.arange(length_B.sum()) + offset_B.repeat(length_B)


class _Path:
    """The path from a root to the last token of the latest sample, while a tree is built sample by sample.

    The path is stored as a list of runs. A run consists of neighboring nodes that one sample added, and ends at the
    depth at which the next run begins.
    """

    def __init__(self, size: int) -> None:
        self.size = 0
        """Number of nodes in the tree so far."""
        self.parent_T = np.arange(-1, size - 1)
        self.end_T = np.zeros(size, np.int64)
        self._runs: list[tuple[int, int]] = []
        """Depth and node of each run's first token."""
        self._depth = 0
        """Depth of the path's last token, plus 1."""

    def branch(self, shared: int, length: int) -> None:
        """Keep the first `shared` tokens of the path, and continue it with new nodes to a total of `length` tokens."""
        while self._depth > shared:
            depth, node = self._runs[-1]
            leave = max(depth, shared)
            self.end_T[node + leave - depth : node + self._depth - depth] = self.size
            self._depth = leave
            if leave == depth:
                self._runs.pop()
        if length == shared:
            return
        if self._runs:
            depth, node = self._runs[-1]
            self.parent_T[self.size] = node + shared - 1 - depth
        else:
            self.parent_T[self.size] = -1
        self._runs.append((shared, self.size))
        self.size += length - shared
        self._depth = length

    def nodes(self, start: int) -> Ints:
        """Return the path's nodes from the depth `start` on."""
        stop, pieces = self._depth, []
        for depth, node in reversed(self._runs):
            low = max(depth, start)
            pieces.append(np.arange(node + low - depth, node + stop - depth))
            stop = low
            if stop == start:
                break
        return np.concatenate(pieces[::-1]) if len(pieces) > 1 else pieces[0]


def _key(sample: Sample) -> bytes:
    """Return a sample's ids as bytes, which sort equal prefixes together and compare at the speed of memory."""
    n = len(sample.prompt_ids)
    ids = np.empty(len(sample), "<u4")
    ids[:n] = sample.prompt_ids
    ids[n:] = sample.response_ids
    return ids.tobytes()


def _sorted(keys: Sequence[bytes]) -> SortedSamples:
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [_shared(keys[before], keys[i]) for before, i in pairwise(order)]
    return SortedSamples(
        indices=np.array(order, np.int64),
        lengths=np.array([len(keys[i]) // 4 for i in order], np.int64),
        shared=np.array([0, *shared][: len(order)], np.int64),
    )


def _shared(before: bytes, key: bytes) -> int:
    """Return the number of tokens in the longest common prefix of two samples' ids, given as bytes."""
    if key.startswith(before):  # a turn and the one that continues it, found without comparing tokens
        return len(before) // 4
    n = min(len(before), len(key)) // 4
    differ = np.frombuffer(before, "<u4", n) != np.frombuffer(key, "<u4", n)
    return int(differ.argmax()) if differ.any() else n
