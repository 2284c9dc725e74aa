"""Bins and their limits and costs, and functions that the packers of several layouts share.

A bin is a list of samples that become one micro-batch.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentgym.types.arrays import Ints

Indices: TypeAlias = list[int]
"""Positions in a sequence that a function received, such as its samples, its sorted samples or spans of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a forward and backward pass over L tokens: linear * L + square * L^2, in any unit."""

    linear: float = 1.0
    square: float = 0.0

    def of(self, tokens: Ints, squares: Ints) -> NDArray[np.float64]:
        """Return the costs of bins or samples, given each one's number of tokens and sum of squared sample lengths."""
        return self.linear * tokens + self.square * squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Maximum size of a bin; None sets no limit. A sample with too many tokens gets a separate bin."""

    tokens: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.samples is not None:
            raise ValueError("max_tokens_per_microbatch, micro_samples: set one of them, not both")
        for name, value in (("max_tokens_per_microbatch", self.tokens), ("micro_samples", self.samples)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: a micro-batch needs at least 1, got {value}; None sets no limit")


def best_fit(sizes: Ints, budget: int) -> list[Indices]:
    """Put each item, largest first, into the open bin that it leaves with the least free space.

    A bin has room for sizes that add up to `budget`. An item over the budget gets a separate bin. Returns the bins as
    indices into `sizes`.
    """
    order = np.argsort(-sizes, kind="stable")
    count = len(order)
    bins: list[Indices] = []
    room: list[int] = []  # sorted numbers, one for each open bin: its free space times `count`, plus the bin's index
    for item, need in zip(order.tolist(), (sizes[order] * count).tolist(), strict=True):
        at = bisect_left(room, need)
        if at == len(room):
            left = budget * count - need + len(bins)
            bins.append([item])
        else:
            left = room.pop(at) - need
            bins[left % count].append(item)
        insort(room, left, 0, at)
    return bins


def halve_until(count: int, bins: Sequence[Indices], cost: Callable[[Indices], float]) -> list[Indices]:
    """Repeatedly split the costliest bin in half, until there are `count` bins or every bin contains one item."""
    heap = [(-cost(items), items) for items in bins if len(items) > 1]
    done = [items for items in bins if len(items) == 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(done) < count:
        _, items = heapq.heappop(heap)
        for half in (items[: len(items) // 2], items[len(items) // 2 :]):
            if len(half) == 1:
                done.append(half)
            else:
                heapq.heappush(heap, (-cost(half), half))
    return [items for _, items in heap] + done


def costliest_first(bins: Iterable[Indices], cost: Callable[[Indices], float]) -> list[Indices]:
    """Return the bins sorted by decreasing cost, as `assign_to_ranks` requires them."""
    return sorted(bins, key=lambda items: -cost(items))


def next_multiple(count: int, ranks: int) -> int:
    """Return the smallest multiple of `ranks` that is at least `count`."""
    return -(-count // ranks) * ranks
