"""Packs samples into bins for the packed layout, in which a bin has as many tokens as its samples together."""

import heapq

import numpy as np
from numpy.typing import NDArray

from agentgym.train.batching.bins import Cost, Indices, Limit, best_fit, costliest_first, halve_until, next_multiple
from agentgym.types.arrays import Ints

SWAPS = 4
"""Maximum number of swaps of samples, per rank, between the bins that the ranks compute at the same time."""
EVEN = 1e-3
"""Relative difference between the costs of two bins below which they count as balanced."""
FIT_TRIES = 4
"""Number of smaller budgets to try if the samples barely fit, so that the bins are filled evenly."""


def pack(lengths: Ints, cost: Cost, ranks: int, limit: Limit) -> list[Indices]:
    """Put each sample, longest first, into the cheapest bin so far, then swap samples between bins to balance them.

    There are as many bins as the limit requires, rounded up to a multiple of `ranks`. The costliest bin comes first.

    If a bin exceeds the token budget when the bins are balanced by cost, all bins are balanced by number of tokens
    instead. If a bin still exceeds the budget, the samples are packed with `best_fit`, under about the smallest
    budget that needs no more bins.
    """
    costs = cost.of(lengths, lengths**2)
    if limit.tokens is None:
        bins = _by_count(costs, ranks, limit.samples or len(lengths))
    else:
        bins = _by_tokens(lengths, costs, ranks, limit.tokens)
    evened = _evened(bins, costs, lengths, ranks, limit)
    return costliest_first(evened, lambda samples: float(costs[samples].sum()))


def _by_count(costs: NDArray[np.float64], ranks: int, size: int) -> list[Indices]:
    """Return bins of at most `size` samples, balanced by cost."""
    count = next_multiple(-(-len(costs) // size), ranks)
    return _longest_first(list(range(len(costs))), costs, count, size)


def _by_tokens(lengths: Ints, costs: NDArray[np.float64], ranks: int, tokens: int) -> list[Indices]:
    """Return bins of at most `tokens` tokens. A sample with more tokens gets a separate bin."""
    alone = [[sample] for sample in np.flatnonzero(lengths > tokens).tolist()]
    rest = np.flatnonzero(lengths <= tokens)
    total, halves = int(lengths[rest].sum()), int((2 * lengths[rest] > tokens).sum())
    count = next_multiple(len(alone) + max(-(-total // tokens), halves), ranks)
    for key in (costs, lengths):  # balancing by tokens succeeds under tighter budgets than balancing by cost
        bins = _longest_first(rest.tolist(), key, count - len(alone), len(rest))
        if all(sum(lengths[samples].tolist()) <= tokens for samples in bins):
            break
    else:
        bins = [rest[at].tolist() for at in _even_fit(lengths[rest], tokens, len(alone), ranks)]
    bins = alone + bins
    return halve_until(next_multiple(len(bins), ranks), bins, lambda samples: float(costs[samples].sum()))


def _even_fit(sizes: Ints, budget: int, others: int, ranks: int) -> list[Indices]:
    """Pack the items into bins of even sizes, with `best_fit`.

    A smaller budget makes the bins more even. This uses about the smallest one under which each rank gets no more bins
    than under the full budget.

    Args:
        sizes: Tokens of each item.
        budget: Maximum tokens of a bin.
        others: Number of bins that are already packed. All ranks get equally many bins, so these count, too.
        ranks: Number of ranks.

    Returns:
        The new bins, as indices into `sizes`.
    """
    bins = best_fit(sizes, budget)
    most = next_multiple(others + len(bins), ranks) - others
    low = max(-(-int(sizes.sum()) // max(most, 1)), int(sizes.max())) - 1
    for _ in range(FIT_TRIES):
        middle = (low + budget + 1) // 2
        tried = best_fit(sizes, middle)
        if len(tried) <= most:
            bins, budget = tried, middle
        else:
            low = middle
    return bins


def _longest_first(samples: Indices, key: NDArray[np.float64] | Ints, count: int, size: int) -> list[Indices]:
    """Put each sample, largest key first, into the bin whose keys have the smallest sum.

    A sample's key is its cost or its length. A bin gets at most `size` samples. There are `count` bins, or one per
    sample if there are fewer samples.
    """
    keys = key.tolist()
    loads: list[tuple[float, int]] = [(0, number) for number in range(min(count, len(samples)))]
    bins: list[Indices] = [[] for _ in loads]
    for sample in sorted(samples, key=lambda sample: -keys[sample]):
        load, number = loads[0]
        bins[number].append(sample)
        if len(bins[number]) < size:
            heapq.heapreplace(loads, (load + keys[sample], number))
        else:
            heapq.heappop(loads)
    return bins


def _evened(bins: list[Indices], costs: NDArray[np.float64], lengths: Ints, ranks: int, limit: Limit) -> list[Indices]:
    """Balance the bins that ranks compute at the same time.

    Samples of the costliest bin are swapped with samples of the other bins.
    """
    bins = sorted(bins, key=lambda samples: -float(costs[samples].sum()))
    for start in range(0, len(bins), ranks):
        near = bins[start : start + ranks]  # the bins that `assign_to_ranks` lets the ranks compute at the same time
        load = [float(costs[samples].sum()) for samples in near]
        for _ in range(SWAPS * len(near)):
            order = sorted(range(len(near)), key=load.__getitem__)
            high = order[-1]
            if load[high] - load[order[0]] <= EVEN * load[high]:
                break
            if not any(_swap(near[high], near[low], costs, lengths, limit) for low in order[:-1]):
                break
            load = [float(costs[samples].sum()) for samples in near]
    return bins


def _swap(high: Indices, low: Indices, costs: NDArray[np.float64], lengths: Ints, limit: Limit) -> bool:
    """Bring the costs of two bins as close together as one swap of two samples, or one move of a sample, can.

    `high` is the costlier bin. Let d be the cost by which it gets cheaper and `low` gets costlier: the cost of the
    sample that leaves `high`, minus that of the sample that leaves `low`, if there is one. If d is between 0 and the
    gap between the two bins, the costlier bin becomes cheaper. If d = gap / 2, the bins become equal. Returns False,
    with nothing changed, if no swap or move within the limit helps.
    """
    gap = float(costs[high].sum() - costs[low].sum())
    tokens = limit.tokens or int(lengths.sum())
    moves = len(high) > 1 and len(low) < (limit.samples or len(lengths))
    cheap = np.append(costs[low], [0.0] if moves else [])  # the last entry means no sample
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
