"""Samples into bins, one of which is one rank's part of one micro-batch. Numbers only."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentgym.train.batching.prefix_tree import SortedSamples
from agentgym.types import Ints

Bin = list[int]
"""Indices of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a row of L tokens takes a forward and backward: linear L + square L^2, in any unit."""

    linear: float = 1.0
    square: float = 0.0

    def of(self, tokens: Ints, squares: Ints) -> NDArray[np.float64]:
        """Cost of so many tokens with that sum of squared lengths."""
        return self.linear * tokens + self.square * squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a bin may hold; None: no limit. A sample over the tokens stands alone."""

    tokens: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.rows is not None:
            raise ValueError("micro_tokens, micro_rows: give one of them, not both")
        for name, value in (("micro_tokens", self.tokens), ("micro_rows", self.rows)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: a micro-batch needs at least 1, got {value}; None is without limit")


def padded_bins(lengths: Ints, cost: Cost, ranks: int, limit: Limit) -> list[Bin]:
    """Neighbours in length, as they are padded to the longest; the costliest bin as cheap as it can be.

    ::

        lengths   9 8 8 5 5 4 3 1     tokens 16     9 | 8 8 | 5 5 4 | 3 1     rows x longest: 9 16 15 6

    Limits and costs are those of the padded rows. As many bins as the limit needs, filled up to a multiple of `ranks`.
    """
    order = np.argsort(-lengths, kind="stable")
    tokens, costs = lengths[order].tolist(), cost.of(lengths, lengths**2)[order].tolist()
    cut = _cut(tokens, costs, limit, float("inf"))
    count = _multiple(len(cut), ranks)
    low, high = 0.0, max((stop - start) * costs[start] for start, stop in cut)
    for _ in range(12):  # to 1/4096 of the costliest
        middle = (low + high) / 2
        finer = _cut(tokens, costs, limit, middle)
        if len(finer) <= count:
            cut, high = finer, middle
        else:
            low = middle
    rows, place = order.tolist(), np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return _parted([rows[a:b] for a, b in cut], lambda part: len(part) * costs[int(place[part[0]])], count)


def packed_bins(lengths: Ints, cost: Cost, ranks: int, limit: Limit) -> list[Bin]:
    """Longest first into the bin that has cost least so far, then swaps; as many bins as the limit needs.

    Where a token budget is too tight for that, the bins are made even in tokens; where it is tighter still, each is
    filled with the longest that fits, up to the least budget that makes no more of them.
    """
    costs = cost.of(lengths, lengths**2)
    if limit.tokens is None:
        size = limit.rows or len(lengths)
        count = _multiple(-(-len(lengths) // size), ranks)
        return _evened(_longest_first(list(range(len(lengths))), costs, count, size), costs, lengths, ranks, limit)
    alone = [[row] for row in np.flatnonzero(lengths > limit.tokens).tolist()]
    rest = np.flatnonzero(lengths <= limit.tokens)
    total, halves = int(lengths[rest].sum()), int((2 * lengths[rest] > limit.tokens).sum())
    count = _multiple(len(alone) + max(-(-total // limit.tokens), halves), ranks)
    for key in (costs, lengths):  # even in tokens holds a tighter budget than even in cost
        bins = _longest_first(rest.tolist(), key, count - len(alone), len(rest))
        if all(sum(lengths[part].tolist()) <= limit.tokens for part in bins):
            break
    else:
        bins = [rest[part].tolist() for part in _even_fit(lengths[rest], limit.tokens, len(alone), ranks)]
    bins = _parted(alone + bins, lambda part: float(costs[part].sum()), _multiple(len(alone) + len(bins), ranks))
    return _evened(bins, costs, lengths, ranks, limit)


def _even_fit(sizes: Ints, budget: int, others: int, ranks: int) -> list[Bin]:
    """`best_fit` under about the least budget that makes, with `others`, as many rounds of bins as this one does."""
    bins = best_fit(sizes, budget)
    most = _multiple(others + len(bins), ranks) - others
    low = max(-(-int(sizes.sum()) // max(most, 1)), int(sizes.max())) - 1
    for _ in range(4):
        middle = (low + budget + 1) // 2
        tried = best_fit(sizes, middle)
        if len(tried) <= most:
            bins, budget = tried, middle
        else:
            low = middle
    return bins


PIECE = 1 / 16
"""Of a token budget: how many tokens are computed twice rather than open another bin."""


def tree_bins(order: SortedSamples, cost: Cost, ranks: int, tokens: int | None) -> list[Bin]:
    """Samples that share prefixes together, cut where little is shared: at most `tokens` unique tokens a bin.

    The bins hold places of the order.
    """
    if tokens is None:
        tokens = _even_budget(order, ranks)
    bins = _grafted(order, tokens)
    return _parted(bins, lambda part: tree_cost(order, part, cost), _multiple(len(bins), ranks))


def tree_cost(order: SortedSamples, places: Bin, cost: Cost) -> float:
    """What the forest of the samples at these places of the order costs: a shared prefix counts once."""
    at = np.sort(places)
    shared = np.where(np.diff(at, prepend=-2) == 1, order.shared[at], 0)
    lengths = order.lengths[at]
    return float(cost.of((lengths - shared).sum(), (lengths**2 - shared**2).sum()))


def _grafted(order: SortedSamples, tokens: int) -> list[Bin]:
    """Places of the order cut into forests, and small forests put together up to the budget."""
    pieces = order.cuts(tokens, worth=int(tokens * PIECE))
    starts = np.cumsum([0] + [len(piece) for piece in pieces])
    unique = np.add.reduceat(order.lengths - order.shared, starts[:-1]) + order.shared[starts[:-1]]
    bins = best_fit(unique, tokens)
    return [[place for i in part for place in range(starts[i], starts[i + 1])] for part in bins]


def _even_budget(order: SortedSamples, ranks: int) -> int:
    """About the smallest budget that makes no more bins than there are ranks."""
    tokens = order.unique_tokens
    if ranks == 1:
        return tokens
    budget = -(-tokens // ranks)
    while budget < tokens and len(_grafted(order, budget)) > ranks:
        budget += -(-budget // 16)
    return budget


def best_fit(sizes: Ints, budget: int) -> list[Bin]:
    """Largest first into the bin that it fills up most; what is over the budget stands alone."""
    order = np.argsort(-sizes, kind="stable").tolist()
    needs = sizes.tolist()
    bins: list[Bin] = []
    room: list[int] = []  # sorted, and whose room it is
    whose: list[int] = []
    for item in order:
        at = bisect_left(room, needs[item])
        if at == len(room):
            left, home = budget - needs[item], len(bins)
            bins.append([item])
        else:
            left, home = room.pop(at) - needs[item], whose.pop(at)
            bins[home].append(item)
        at = bisect_left(room, left)
        room.insert(at, left)
        whose.insert(at, home)
    return bins


def _longest_first(rows: Bin, key: NDArray[np.float64] | Ints, count: int, size: int) -> list[Bin]:
    """The rows in `count` bins of at most `size`, costliest first to the cheapest bin; fewer bins for fewer rows."""
    costs = key.tolist()
    loads: list[tuple[float, int]] = [(0, place) for place in range(min(count, len(rows)))]
    bins: list[Bin] = [[] for _ in loads]
    for row in sorted(rows, key=lambda row: -costs[row]):
        load, place = loads[0]
        bins[place].append(row)
        if len(bins[place]) < size:
            heapq.heapreplace(loads, (load + costs[row], place))
        else:
            heapq.heappop(loads)
    return bins


SWAPS = 4
"""How often a rank's row of a micro-batch may be evened, on average."""
EVEN = 1e-3
"""Costs this close, relatively, are left as they are."""


def _evened(bins: list[Bin], costs: NDArray[np.float64], lengths: Ints, ranks: int, limit: Limit) -> list[Bin]:
    """The same, neighbours in cost brought closer: swaps between the costliest of `ranks` bins and the others."""
    bins = sorted(bins, key=lambda part: -float(costs[part].sum()))
    for start in range(0, len(bins), ranks):
        near = bins[start : start + ranks]  # one micro-batch, when they are dealt
        load = [float(costs[part].sum()) for part in near]
        for _ in range(SWAPS * len(near)):
            order = sorted(range(len(near)), key=load.__getitem__)
            high = order[-1]
            if load[high] - load[order[0]] <= EVEN * load[high]:
                break
            if not any(_swap(near[high], near[low], costs, lengths, limit) for low in order[:-1]):
                break
            load = [float(costs[part].sum()) for part in near]
    return bins


def _swap(high: Bin, low: Bin, costs: NDArray[np.float64], lengths: Ints, limit: Limit) -> bool:
    """Swap two rows, or move one, so that the costs of the two bins come as close as one swap can; False if none does.

    A swap takes d = cost of the row from `high` - cost of the row from `low` away from the one and gives it to the
    other: with d between 0 and the gap the costlier one becomes cheaper, and d = gap / 2 makes them equal.
    """
    gap = float(costs[high].sum() - costs[low].sum())
    tokens = limit.tokens or int(lengths.sum())
    moves = len(high) > 1 and len(low) < (limit.rows or len(lengths))
    cheap = np.append(costs[low], [0.0] if moves else [])  # the last stands for no row
    short = np.append(lengths[low], [0] if moves else [])
    change = costs[high][:, None] - cheap
    more = lengths[high][:, None] - short
    fits = (lengths[low].sum() + more <= tokens) & (lengths[high].sum() - more <= tokens)
    change[~fits | (change <= 1e-6 * gap) | (change >= (1 - 1e-6) * gap)] = np.inf
    best = int(np.abs(change - gap / 2).argmin())
    i, j = divmod(best, len(cheap))
    if change[i, j] == np.inf:
        return False
    given = high.pop(i)
    if j < len(low):
        high.append(low.pop(j))
    low.append(given)
    return True


def _cut(tokens: list[int], costs: list[float], limit: Limit, most: float) -> list[tuple[int, int]]:
    """Spans of rows sorted longest first, each padded to its first: within the limit, and within the cost `most`."""
    spans, start = [], 0
    while start < len(tokens):
        size = min(limit.rows or len(tokens), most // costs[start])
        if limit.tokens is not None:
            size = min(size, limit.tokens // tokens[start])
        stop = min(start + max(int(size), 1), len(tokens))
        spans.append((start, stop))
        start = stop
    return spans


def _parted(bins: Sequence[Bin], cost: Callable[[Bin], float], count: int) -> list[Bin]:
    """The same in `count` bins, or in as many as there are rows: the costliest is halved until there are."""
    heap = [(-cost(part), part) for part in bins if len(part) > 1]
    done = [part for part in bins if len(part) == 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(done) < count:
        _, part = heapq.heappop(heap)
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            if len(half) == 1:
                done.append(half)
            else:
                heapq.heappush(heap, (-cost(half), half))
    return [part for _, part in heap] + done


def _multiple(count: int, ranks: int) -> int:
    """The first multiple of `ranks` that is not below."""
    return -(-count // ranks) * ranks
