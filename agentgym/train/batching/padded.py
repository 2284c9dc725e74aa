"""Packs samples into bins for the padded layout, in which every sample is padded to the longest one in its bin."""

import numpy as np

from agentgym.train.batching.bins import Cost, Indices, Limit, costliest_first, halve_until, next_multiple
from agentgym.types.arrays import Ints

Span = tuple[int, int]
"""A bin as start and stop indices into the samples, which are sorted longest first."""

HALVINGS = 12
"""Number of steps of the binary search for the lowest possible cost of the costliest bin. 12 steps find it to
1/4096.
"""


def pack(lengths: Ints, cost: Cost, ranks: int, limit: Limit) -> list[Indices]:
    """Put samples of similar length together, and make the costliest bin as cheap as possible.

    ::

        lengths   9 8 8 5 5 4 3 1     tokens 16     9 | 8 8 | 5 5 4 | 3 1     samples x longest: 9 16 15 6

    The costliest bin comes first. Limits and costs count the padding. There are as many bins as the limit needs,
    rounded up to a multiple of `ranks`.
    """
    order = np.argsort(-lengths, kind="stable")
    costs = cost.of(lengths, lengths**2)

    def cost_of(samples: Indices) -> float:
        return len(samples) * float(costs[samples[0]])  # the first is the longest

    spans = _even_spans(lengths[order].tolist(), costs[order].tolist(), ranks, limit)
    bins = [order[start:stop].tolist() for start, stop in spans]
    return costliest_first(halve_until(next_multiple(len(bins), ranks), bins, cost_of), cost_of)


def _even_spans(tokens: list[int], costs: list[float], ranks: int, limit: Limit) -> list[Span]:
    """Cut the sorted samples into spans within the limit, with the costliest span as cheap as possible.

    There are at most as many spans as the limit requires, rounded up to a multiple of `ranks`. `tokens` and `costs`
    contain one number for each sample.
    """
    spans = _cut(tokens, costs, limit, float("inf"))
    count = next_multiple(len(spans), ranks)
    low, high = 0.0, max((stop - start) * costs[start] for start, stop in spans)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        finer = _cut(tokens, costs, limit, middle)
        if len(finer) <= count:
            spans, high = finer, middle
        else:
            low = middle
    return spans


def _cut(tokens: list[int], costs: list[float], limit: Limit, most: float) -> list[Span]:
    """Cut the sorted samples into spans that are within the limit and cost at most `most` each.

    A sample that exceeds either alone gets a separate span. `tokens` and `costs` contain one number for each sample.
    """
    spans, start = [], 0
    while start < len(tokens):
        size = min(limit.samples or len(tokens), most // costs[start])
        if limit.tokens is not None:
            size = min(size, limit.tokens // tokens[start])
        stop = min(start + max(int(size), 1), len(tokens))
        spans.append((start, stop))
        start = stop
    return spans
