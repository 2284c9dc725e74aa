"""Which samples share an optimizer step, a rank and a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from agentgym.train.batching.bin_packing import Bin, Cost, Limit, packed_bins, padded_bins, tree_bins, tree_cost
from agentgym.train.batching.prefix_tree import sort_samples
from agentgym.types import Ints, Sample

if TYPE_CHECKING:
    from agentgym.train.batching.layouts import Layout

Balance: TypeAlias = Literal["length", "square", "flops"]

LENGTH = Cost()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward: rows of the mini-batch, never none."""

    rows: tuple[int, ...]
    masked: bool = False
    """A padding row: computed with its loss mask off, so that this rank makes as many forwards as the others."""


def cost_of(balance: Balance, hidden: int) -> Cost:
    """What is made even between ranks: L, L^2, or the FLOPs of a row of L tokens, L + L^2 / (6 hidden).

    A layer of 12 hidden^2 weights takes 24 hidden^2 FLOPs a token and 4 hidden a pair of tokens (arXiv 2104.04473).
    """
    if balance == "length":
        return LENGTH
    if balance == "square":
        return Cost(linear=0.0, square=1.0)
    if balance == "flops":
        return Cost(square=1 / (6 * hidden))
    raise ValueError(f"balance: {balance!r} is none of length, square, flops")


def mini_batches(samples: Sequence[Sample], *, rollouts: int | None = None) -> list[list[int]]:
    """Row indices of each optimizer step: at most this many rollouts, with all of their samples.

    Steps are as even as can be: 9 rollouts by 8 are 5 and 4, not 8 and 1. Rollouts keep the order in which they
    first appear. Without a count, everything is one step. Every row is in exactly one step.
    """
    if rollouts is not None and rollouts < 1:
        raise ValueError(f"rollouts: a mini-batch needs at least 1, got {rollouts}")
    units: dict[str, list[int]] = {}
    for i, row in enumerate(samples):
        units.setdefault(row.rollout_id, []).append(i)
    if not units:
        return []
    steps = 1 if rollouts is None else -(-len(units) // rollouts)
    batches: list[list[int]] = [[] for _ in range(steps)]
    for place, rows in enumerate(units.values()):
        batches[place * steps // len(units)] += rows
    return batches


def plan_step(
    samples: Sequence[Sample], *, ranks: int, layout: "Layout" = "padded", micro_tokens: int | None, cost: Cost
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank for one optimizer step; see `shares`.

    Under `tree`, samples that share a prefix are put together: a budget counts each token of a micro-batch once, and
    so does the cost.
    """
    if layout != "tree":
        lengths = [len(row) for row in samples]
        return shares(lengths, ranks=ranks, micro_tokens=micro_tokens, layout=layout, cost=cost)
    limit = Limit(tokens=micro_tokens)
    order = sort_samples(samples)
    _check(order.lengths, ranks)
    places = tree_bins(order, cost, ranks, limit.tokens)
    costs = [tree_cost(order, part, cost) for part in places]
    shortest = int(order.rows[order.lengths.argmin()])
    return assign_to_ranks([order.rows[part].tolist() for part in places], costs, ranks=ranks, padding_sample=shortest)


def shares(
    lengths: Sequence[int],
    *,
    ranks: int,
    micro_tokens: int | None = None,
    micro_rows: int | None = None,
    layout: Literal["padded", "packed"] = "padded",
    cost: Cost = LENGTH,
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, equally many on every rank, each row in exactly one of them.

    `lengths` are tokens, prompt and response. A micro-batch has at most `micro_rows` rows, or at most `micro_tokens`
    tokens as the layout counts them: rows x longest if padded, the sum if packed. A row over the budget stands alone.
    Rows of like cost meet in a micro-batch, for its slowest rank is what the others wait for; the costliest come
    first. Where there are fewer rows than ranks could take, the others get masked padding rows.
    """
    limit = Limit(tokens=micro_tokens, rows=micro_rows)
    tokens = np.asarray(lengths, np.int64)
    _check(tokens, ranks)
    costs = cost.of(tokens, tokens**2)
    if layout == "padded":
        bins = padded_bins(tokens, cost, ranks, limit)
        load = [len(part) * float(costs[part].max()) for part in bins]
    else:
        bins = packed_bins(tokens, cost, ranks, limit)
        load = [float(costs[part].sum()) for part in bins]
    return assign_to_ranks(bins, load, ranks=ranks, padding_sample=int(tokens.argmin()))


def assign_to_ranks(
    bins: Sequence[Bin], costs: Sequence[float], *, ranks: int, padding_sample: int
) -> list[list[MicroBatch]]:
    """The bins dealt out to the ranks, costliest first, `ranks` of like cost at a time; `padding_sample` is masked.

    ::

        costs     9 8 8 | 7 5 5 | 4 1       rank 0   9  5  4
                                            rank 1   8  5  1
                                            rank 2   8  7  .     every other time from the far end; . is masked
    """
    by_cost = sorted(range(len(bins)), key=lambda i: -costs[i])
    padding = MicroBatch(rows=(padding_sample,), masked=True)
    plans: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(by_cost), ranks):
        dealt = [MicroBatch(rows=tuple(bins[i])) for i in by_cost[start : start + ranks]]
        dealt += [padding] * (ranks - len(dealt))
        for plan, micro in zip(plans, dealt if start // ranks % 2 == 0 else dealt[::-1], strict=True):
            plan.append(micro)
    return plans


def over_budget(lengths: Sequence[int], micro_tokens: int | None) -> int:
    """How many rows are longer than a micro-batch's token budget, and stand alone."""
    return 0 if micro_tokens is None else sum(length > micro_tokens for length in lengths)


def _check(lengths: Ints, ranks: int) -> None:
    if not len(lengths) or ranks < 1:
        raise ValueError(f"lengths, ranks: nothing to share out ({len(lengths)} rows, {ranks} ranks)")
    if lengths.min() < 1:
        raise ValueError(f"lengths: row {int(lengths.argmin())} has no token; leave it out")
