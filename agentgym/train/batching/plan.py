"""The plan of an optimizer step: which samples share a mini-batch, a rank and a micro-batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from agentgym.train.batching import packed, padded, tree
from agentgym.train.batching.bins import Cost, Indices, Limit
from agentgym.train.batching.prefix_tree import sort_samples
from agentgym.types.arrays import Ints
from agentgym.types.sample import Sample

if TYPE_CHECKING:
    from agentgym.train.batching.layouts import Layout

Balance: TypeAlias = Literal["length", "square", "flops"]

Plan: TypeAlias = list[list[Indices]]
"""For each rank, its micro-batches. Each is a list of sample indices, or an empty list for padding.

All ranks have the same number of micro-batches. For padding, a rank computes some sample without training on it, so
that all ranks run the same number of forward passes.
"""

LENGTH = Cost()


def cost_of(balance: Balance, hidden: int) -> Cost:
    """Return the function by which a sequence's cost is estimated, so that all ranks get about the same cost.

    For a sequence of L tokens, the cost is L (length), L^2 (square), or L + L^2 / (6 hidden) (flops). The last one is
    proportional to the FLOPs of a layer with 12 hidden^2 weights: 24 hidden^2 FLOPs for each token, and 4 hidden FLOPs
    for each pair of tokens (arXiv 2104.04473).

    Args:
        balance: The kind of cost.
        hidden: The model's hidden size.
    """
    if balance == "length":
        return LENGTH
    if balance == "square":
        return Cost(linear=0.0, square=1.0)
    if balance == "flops":
        return Cost(square=1 / (6 * hidden))
    raise ValueError(f"balance: expected length, square or flops, got {balance!r}")


def mini_batches(samples: Sequence[Sample], *, rollouts: int | None = None) -> list[list[int]]:
    """Divide the samples into optimizer steps of at most `rollouts` rollouts each.

    Returns the indices of each step's samples. A rollout's samples are all in the same step. Steps are as even as
    possible: 9 rollouts with a limit of 8 make steps of 5 and 4, not 8 and 1. Rollouts keep the order in which they
    first appear. If `rollouts` is None, everything is one step. Every sample is in exactly one step.
    """
    if rollouts is not None and rollouts < 1:
        raise ValueError(f"rollouts: a mini-batch needs at least 1, got {rollouts}")
    by_rollout: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        by_rollout.setdefault(sample.rollout_id, []).append(i)
    if not by_rollout:
        return []
    steps = 1 if rollouts is None else -(-len(by_rollout) // rollouts)
    batches: list[list[int]] = [[] for _ in range(steps)]
    for number, indices in enumerate(by_rollout.values()):
        batches[number * steps // len(by_rollout)] += indices
    return batches


def plan_step(
    samples: Sequence[Sample],
    *,
    ranks: int,
    layout: "Layout" = "padded",
    max_tokens_per_microbatch: int | None,
    cost: Cost,
) -> Plan:
    """Return the micro-batches of each rank for one optimizer step.

    The micro-batches are planned as in `plan_lengths`, except under `tree`. There, samples that share a prefix are put
    together, and the budget and the cost count each unique token of a micro-batch once.
    """
    if layout != "tree":
        lengths = [len(sample) for sample in samples]
        return plan_lengths(
            lengths, ranks=ranks, max_tokens_per_microbatch=max_tokens_per_microbatch, layout=layout, cost=cost
        )
    limit = Limit(tokens=max_tokens_per_microbatch)
    order = sort_samples(samples)
    _check(order.lengths, ranks)
    return assign_to_ranks(tree.pack(order, cost, ranks, limit.tokens), ranks)


def plan_lengths(
    lengths: Sequence[int],
    *,
    ranks: int,
    max_tokens_per_microbatch: int | None = None,
    micro_samples: int | None = None,
    layout: Literal["padded", "packed"] = "padded",
    cost: Cost = LENGTH,
) -> Plan:
    """Return the micro-batches of each rank. Each sample is in exactly one of them.

    Micro-batches of similar cost run at the same time, because all ranks wait for the slowest one. The costliest come
    first. If there aren't enough samples for all ranks, the other ranks get padding.

    Args:
        lengths: Number of tokens of each sample, prompt and response.
        ranks: Number of ranks.
        max_tokens_per_microbatch: Maximum number of tokens in a micro-batch, as the layout counts them: samples x
            longest for padded, the sum for packed. A sample over the budget gets a separate micro-batch. None sets no
            limit.
        micro_samples: Maximum number of samples in a micro-batch, instead of the limit on tokens. None sets no limit.
        layout: Layout of the forward pass.
        cost: Cost of a sample.

    Raises:
        ValueError: If there is nothing to plan, if a sample is empty, or if both limits are given.
    """
    limit = Limit(tokens=max_tokens_per_microbatch, samples=micro_samples)
    tokens = np.asarray(lengths, np.int64)
    _check(tokens, ranks)
    return assign_to_ranks({"padded": padded.pack, "packed": packed.pack}[layout](tokens, cost, ranks, limit), ranks)


def assign_to_ranks(bins: Sequence[Indices], ranks: int) -> Plan:
    """Distribute bins over the ranks, `ranks` bins of similar cost at a time.

    The bins must be sorted, costliest first.

    ::

        costs     9 8 8 | 7 5 5 | 4 1       rank 0   9  5  4
                                            rank 1   8  5  1
                                            rank 2   8  7  .     every second time in reverse order

    A rank without a bin (.) gets padding.
    """
    plans: Plan = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        dealt = [*bins[start : start + ranks], *([] for _ in range(start + ranks - len(bins)))]
        for plan, samples in zip(plans, dealt if start // ranks % 2 == 0 else dealt[::-1], strict=True):
            plan.append(samples)
    return plans


def over_budget(lengths: Sequence[int], max_tokens_per_microbatch: int | None) -> int:
    """Return how many samples have more tokens than a micro-batch may. Each of them gets a separate micro-batch."""
    return 0 if max_tokens_per_microbatch is None else sum(length > max_tokens_per_microbatch for length in lengths)


def _check(lengths: Ints, ranks: int) -> None:
    if not len(lengths) or ranks < 1:
        raise ValueError(f"lengths, ranks: nothing to distribute ({len(lengths)} samples, {ranks} ranks)")
    if lengths.min() < 1:
        raise ValueError(f"lengths: sample {int(lengths.argmin())} has no tokens; leave it out")
