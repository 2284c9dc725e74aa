"""Packs samples into bins for the tree layout, in which a bin's samples share the tokens of their common prefixes."""

import numpy as np

from agentgym.train.batching.bins import Cost, Indices, best_fit, costliest_first, halve_until, next_multiple
from agentgym.train.batching.prefix_tree import SortedSamples

PIECE = 1 / 16
"""Fraction of the token budget that may be computed twice in order to save a bin."""


def pack(order: SortedSamples, cost: Cost, ranks: int, tokens: int | None) -> list[Indices]:
    """Put samples that share prefixes together, with at most `tokens` unique tokens in a bin.

    The samples are cut into bins between neighbors that share few tokens. If `tokens` is None, there are about as
    many bins as ranks. The costliest bin comes first.
    """
    if tokens is None:
        tokens = _even_budget(order, ranks)

    def cost_of(positions: Indices) -> float:
        return _cost(order, positions, cost)

    bins = _fill(order, tokens)
    bins = costliest_first(halve_until(next_multiple(len(bins), ranks), bins, cost_of), cost_of)
    return [order.indices[at].tolist() for at in bins]


def _cost(order: SortedSamples, positions: Indices, cost: Cost) -> float:
    """Return the cost of one tree of the samples at these positions in `order`. A shared prefix counts once."""
    at = np.sort(positions)
    shared = np.where(np.diff(at, prepend=-2) == 1, order.shared[at], 0)
    lengths = order.lengths[at]
    return float(cost.of((lengths - shared).sum(), (lengths**2 - shared**2).sum()))


def _fill(order: SortedSamples, tokens: int) -> list[Indices]:
    """Cut the sorted samples into trees, and combine small trees up to the budget. Returns positions in `order`."""
    spans = order.cuts(tokens, tree_price=int(tokens * PIECE))
    starts = np.array([start for start, _ in spans])
    unique = np.add.reduceat(order.lengths - order.shared, starts) + order.shared[starts]
    return [[at for number in numbers for at in range(*spans[number])] for numbers in best_fit(unique, tokens)]


def _even_budget(order: SortedSamples, ranks: int) -> int:
    """Return about the smallest token budget under which there are no more bins than ranks."""
    tokens = order.unique_tokens
    if ranks == 1:
        return tokens
    budget = -(-tokens // ranks)
    while budget < tokens and len(_fill(order, budget)) > ranks:
        budget += -(-budget // 16)
    return budget
