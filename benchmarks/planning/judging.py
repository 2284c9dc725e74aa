"""The quality of a plan: its balance between ranks, the tokens that it computes, and the samples that it loses."""

from collections.abc import Callable
from typing import Any

import numpy as np

from agentgym.train.batching.plan import Balance, Plan
from agentgym.types.arrays import Ints
from benchmarks.planning.ours import Lengths


def grid(plans: Plan, value: Callable[[list[int]], float]) -> Any:
    """Return the value of each micro-batch on each rank, as an array of micro-batches x ranks; 0 for padding."""
    return np.array([[value(m) if m else 0.0 for m in plan] for plan in plans]).T


def uneven(cost: Any) -> float:
    """Return the straggler: the micro-batches' cost divided by their cost if all ranks were equally busy."""
    return float(cost.max(1).sum() / cost.sum() * cost.shape[1])


def judge(
    name: str, plans: Plan, lengths: Ints, seconds: float, module: Any, *, padded: bool = False
) -> dict[str, float]:
    """Return the quality of a plan without shared prefixes."""
    # A padded block is computed with a mask, which skips no pair of tokens.
    flops = np.array([module.flops(n, n * n if padded else n * (n + 1) / 2) for n in lengths.tolist()])
    squares = grid(plans, lambda m: float((lengths[m] ** 2).sum()))

    def load(rows: list[int]) -> float:
        return len(rows) * float(flops[rows].max()) if padded else float(flops[rows].sum())

    real = [m for plan in plans for m in plan if m]
    rows = {
        "micro_batches": len(plans[0]),
        "straggler": uneven(grid(plans, load)),
        "imbalance": float(np.mean([module.imbalance(row) for row in squares])),
        "most_tokens": max(int(lengths[m].sum()) for m in real),
        "masked_rows": sum(not m for plan in plans for m in plan),
        "lost_or_twice": lost_or_twice(plans, len(lengths)),
        "us_a_sample": seconds / len(lengths) * 1e6,
    }
    return {f"{name}_{key}": float(value) for key, value in rows.items()}


def padded_tokens(plans: Plan, lengths: Ints) -> float:
    """Return the tokens computed in the padded layout divided by the real ones."""
    padded = grid(plans, lambda m: float(len(m) * lengths[m].max()))
    return float(padded.sum() / lengths.sum())


def judge_tree(key: Balance, plans: Plan, of: Lengths, seconds: float) -> dict[str, float]:
    """Return the quality of a plan by prefix, whose load is computed from the lengths and groups."""

    def unique(rows: list[int]) -> float:
        _, first = np.unique(of.group[rows], return_index=True)
        return float(of.completion[rows].sum() + of.prompt[rows][first].sum())

    load = grid(plans, unique)
    _, first = np.unique(of.group, return_index=True)
    real = int(of.whole.sum())
    rows = {
        "micro_batches": load.shape[0],
        "straggler": uneven(load),
        "saved": 1 - load.sum() / real,
        "saved_bound": (of.prompt.sum() - of.prompt[first].sum()) / real,
        "most_tokens": load.max(),
        "lost_or_twice": lost_or_twice(plans, len(of.prompt)),
        "us_a_sample": seconds / len(of.prompt) * 1e6,
    }
    return {f"tree_{key}_{name}": float(value) for name, value in rows.items()}


def lost_or_twice(plans: Plan, count: int) -> int:
    """Return the number of samples, out of `count`, that are not in the plan exactly once."""
    placed = np.bincount([row for plan in plans for m in plan for row in m], minlength=count)
    return int((placed != 1).sum())
