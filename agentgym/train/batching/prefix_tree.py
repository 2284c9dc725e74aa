"""Samples as a forest of shared prefixes, in one depth-first row: each token once. Numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from agentgym.types import Ints, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """T tokens (nodes) in one row, depth first: the context of node q is every k with `k <= q < end_T[k]`.

    ::

        samples   P P a b           node     0  1  2  3  4  5  6
                  P P a c d         ids      P  P  a  b  c  d  x
                  x                 depth    0  1  2  3  3  4  0
                                    parent  -1  0  1  2  2  4 -1
                                    end      6  6  6  4  6  6  7
    """

    token_ids_T: Ints
    depth_T: Ints
    """A node's position in each of its samples, from 0."""
    parent_T: Ints
    """The node before it in each of its samples; -1 for a sample's first token."""
    end_T: Ints
    """One past the last node below it."""
    responses: Ints
    """The nodes of the samples' response tokens, sample after sample, as the samples were given."""

    def __len__(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedSamples:
    """Samples sorted by their tokens: none shares more with an earlier one than with the one just before it.

    So the unique tokens of any neighbours are the first one's `lengths`, and `lengths - shared` of the others.
    """

    rows: Ints
    """Indices of the samples."""
    lengths: Ints
    """Tokens of each, prompt and response."""
    shared: Ints
    """Tokens with which each begins as the one before it does; 0 for the first."""

    @property
    def unique_tokens(self) -> int:
        """Tokens of the forest of all of them."""
        return int((self.lengths - self.shared).sum())

    def cuts(self, tokens: int, *, worth: int = 0) -> list[Ints]:
        """Indices of the samples of forests with at most `tokens` unique tokens each; neighbours stay together.

        A prefix that lies across a cut is in two forests: no cut of this order repeats fewer tokens, and none that
        repeats as few makes fewer forests. With `worth` above 0, so many tokens may be repeated for each forest
        less. A sample of more than `tokens` stands alone.
        """
        count = len(self.rows)
        before = np.concatenate([[0], (self.lengths - self.shared).cumsum()])
        cost = np.zeros(count + 1, np.int64)  # of the first so many samples: repeated tokens, then forests
        start_of = np.zeros(count + 1, np.int64)  # where the last of their forests begins
        low = 0
        for stop in range(1, count + 1):
            while low < stop - 1 and self.shared[low] + before[stop] - before[low] > tokens:
                low += 1
            costs = cost[low:stop] + (self.shared[low:stop] + worth) * (count + 1) + 1
            start_of[stop] = low + costs.argmin()
            cost[stop] = costs.min()
        starts = [count]
        while starts[-1]:
            starts.append(int(start_of[starts[-1]]))
        return [self.rows[start:stop] for start, stop in pairwise(reversed(starts))]


def sort_samples(samples: Sequence[Sample]) -> SortedSamples:
    """The samples sorted by their tokens, and how much neighbours share."""
    return _order([_key(sample) for sample in samples])


def unique_tokens(samples: Sequence[Sample]) -> int:
    """How many tokens are left when every shared prefix counts once."""
    return sort_samples(samples).unique_tokens


def build_prefix_tree(samples: Sequence[Sample]) -> PrefixTree:
    """The forest of these samples, `unique_tokens(samples)` nodes. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("samples: none to plant; an empty forest has no row")
    keys = [_key(sample) for sample in samples]
    order = _order(keys)
    path = _Path(order.unique_tokens)
    responses: list[Ints] = [order.rows] * len(samples)
    for row, length, shared in zip(order.rows.tolist(), order.lengths.tolist(), order.shared.tolist(), strict=True):
        path.turn(shared, length)
        responses[row] = path.nodes(len(samples[row].prompt_ids))
    path.turn(0, 0)
    added = order.lengths - order.shared
    suffixes = [np.frombuffer(keys[row], "<u4", offset=4 * n) for row, n in zip(order.rows, order.shared, strict=True)]
    return PrefixTree(
        token_ids_T=np.concatenate(suffixes, dtype=np.int64),
        depth_T=np.arange(path.size) + (order.shared - added.cumsum() + added).repeat(added),
        parent_T=path.parent_T,
        end_T=path.end_T,
        responses=np.concatenate(responses),
    )


def pack(samples: Sequence[Sample]) -> PrefixTree:
    """The samples side by side in their order, no token shared. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("samples: none to lay out; an empty row has no shape")
    length_B = np.array([len(sample) for sample in samples])
    stop_B = length_B.cumsum()
    start_T = (stop_B - length_B).repeat(length_B)
    place_T = np.arange(stop_B[-1])
    parent_T = place_T - 1
    parent_T[stop_B - length_B] = -1
    prompt_B = np.array([len(sample.prompt_ids) for sample in samples])
    return PrefixTree(
        token_ids_T=np.concatenate([ids for sample in samples for ids in (sample.prompt_ids, sample.response_ids)]),
        depth_T=place_T - start_T,
        parent_T=parent_T,
        end_T=stop_B.repeat(length_B),
        responses=place_T[place_T - start_T >= prompt_B.repeat(length_B)],
    )


class _Path:
    """The way from a root to the last sample's last token, while the forest grows sample by sample.

    It is a list of runs: neighbouring nodes that one sample added. A run ends at the depth at which the next begins.
    """

    def __init__(self, size: int) -> None:
        self.size = 0
        """Nodes so far."""
        self.parent_T = np.arange(-1, size - 1)
        self.end_T = np.zeros(size, np.int64)
        self._runs: list[tuple[int, int]] = []
        """(depth, node) of each run's first token."""
        self._depth = 0
        """One past the last token's."""

    def turn(self, shared: int, length: int) -> None:
        """Leave the path `shared` tokens deep, and go on with new nodes to the depth `length`."""
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
        """The nodes of the path from the depth `start` on."""
        stop, pieces = self._depth, []
        for depth, node in reversed(self._runs):
            low = max(depth, start)
            pieces.append(np.arange(node + low - depth, node + stop - depth))
            stop = low
            if stop == start:
                break
        return np.concatenate(pieces[::-1]) if len(pieces) > 1 else pieces[0]


def _key(sample: Sample) -> bytes:
    """The ids as bytes: what sorts by them sorts equal prefixes together, and compares at the speed of memory."""
    n = len(sample.prompt_ids)
    ids = np.empty(len(sample), "<u4")
    ids[:n] = sample.prompt_ids
    ids[n:] = sample.response_ids
    return ids.tobytes()


def _order(keys: Sequence[bytes]) -> SortedSamples:
    rows = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [_shared(keys[before], keys[row]) for before, row in pairwise(rows)]
    return SortedSamples(
        rows=np.array(rows, np.int64),
        lengths=np.array([len(keys[row]) // 4 for row in rows], np.int64),
        shared=np.array([0, *shared][: len(rows)], np.int64),
    )


def _shared(before: bytes, key: bytes) -> int:
    """Tokens of their longest common prefix."""
    if key.startswith(before):  # a turn and the next: no need to look at each token
        return len(before) // 4
    n = min(len(before), len(key)) // 4
    differ = np.frombuffer(before, "<u4", n) != np.frombuffer(key, "<u4", n)
    return int(differ.argmax()) if differ.any() else n
