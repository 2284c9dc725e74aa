"""How even a plan is between ranks, and what it takes to make: 4,096 samples, 8 ranks.

`python -m benchmarks.planning [--json] [--workloads FILE.py] [--seed N]`

Imbalance is the mean over micro-batches of (largest - smallest) / mean of the ranks' sums of L^2; straggler is the sum
of the slowest ranks' costs over the costs' even share, in FLOPs of a 4B model (of padded rows where they are padded; in
unique tokens under `tree`). Seconds are CPU seconds, the least of 5 runs.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentgym.train.batching.plan import Balance, MicroBatch, cost_of, plan_lengths, plan_step
from agentgym.types import Ints, Sample
from benchmarks.harness import arguments, at_least, at_most, load_workloads, report

KEYS: tuple[Balance, ...] = ("flops", "square", "length")
RANKS, ROWS, BUDGET, HIDDEN = 8, 8, 16_384, 2560
REFERENCE: dict[str, float | str] = {
    "fixed: longest-first on L^2, straggler": 1.115,
    "fixed: longest-first on L^2, imbalance": 0.023,
    "fixed: verl on L^2, straggler": 1.034,
    "fixed: verl on L^2, imbalance": 0.185,
    "fixed: verl, us": 2.3,
    "fixed: trl 1.16, straggler": 1.44,
    "fixed: trl 1.16, us": 8209.0,
    "fixed: bound within 64 samples, straggler": 1.0014,
    "fixed: bound within 64 samples, imbalance": 0.021,
    "budget: longest-first, straggler, micro-batches": "1.061, 54",
    "budget: verl, straggler, micro-batches": "1.002, 52",
    "budget: verl, us": 1631.0,
    "budget: skyrl, straggler, micro-batches": "1.043, 53 (13 empty rows)",
    "budget: miles first-fit, straggler, micro-batches": "1.017, 51",
    "budget: miles flops, straggler, micro-batches": "1.010, 51 (breaks the cap)",
    "budget: trl 1.16, straggler": "1.34 (loses 5 of 512 samples)",
    "where": "seed 0, another machine",
}

Plan = Sequence[Sequence[MicroBatch]]
"""Micro-batches of each rank."""


def timed(plan: Callable[[], Plan]) -> tuple[Plan, float]:
    """The plan, and the least CPU seconds it took."""
    seconds = []
    for _ in range(5):
        began = time.process_time()
        got = plan()
        seconds.append(time.process_time() - began)
    return got, min(seconds)


def grid(plans: Plan, value: Callable[[MicroBatch], float]) -> Any:
    """The value of each micro-batch, of each rank: M x ranks; 0 for padding."""
    return np.array([[0.0 if m.masked else value(m) for m in plan] for plan in plans]).T


def uneven(cost: Any) -> float:
    """Straggler: what the micro-batches take over what they would take were all ranks equally busy."""
    return float(cost.max(1).sum() / cost.sum() * cost.shape[1])


def judge(
    name: str, plans: Plan, lengths: Ints, seconds: float, module: Any, *, padded: bool = False
) -> dict[str, float]:
    """The figures of a plan without shared prefixes."""
    # A padded block is computed under a mask, which leaves out no pair of tokens.
    flops = np.array([module.flops(n, n * n if padded else n * (n + 1) / 2) for n in lengths.tolist()])
    squares = grid(plans, lambda m: float((lengths[list(m.samples)] ** 2).sum()))

    def load(micro: MicroBatch) -> float:
        rows = list(micro.samples)
        return len(rows) * float(flops[rows].max()) if padded else float(flops[rows].sum())

    real = [m for plan in plans for m in plan if not m.masked]
    placed = np.bincount([row for m in real for row in m.samples], minlength=len(lengths))
    rows = {
        "micro_batches": len(plans[0]),
        "straggler": uneven(grid(plans, load)),
        "imbalance": float(np.mean([module.imbalance(row) for row in squares])),
        "most_tokens": max(int(lengths[list(m.samples)].sum()) for m in real),
        "masked_rows": sum(m.masked for plan in plans for m in plan),
        "lost_or_twice": int((placed != 1).sum()),
        "us_a_sample": seconds / len(lengths) * 1e6,
    }
    return {f"{name}_{key}": float(value) for key, value in rows.items()}


def strided(count: int) -> Plan:
    """Samples to ranks in their order."""
    return [
        [
            MicroBatch(samples=tuple(range(start + rank, start + RANKS * ROWS, RANKS)))
            for start in range(0, count, RANKS * ROWS)
        ]
        for rank in range(RANKS)
    ]


def padded_tokens(plans: Plan, lengths: Ints) -> float:
    """Tokens computed under the padded layout over the real ones."""
    padded = grid(plans, lambda m: float(len(m.samples) * lengths[list(m.samples)].max()))
    return float(padded.sum() / lengths.sum())


def make_samples(prompt: Ints, completion: Ints, group: Ints, seed: int) -> list[Sample]:
    """Samples of random ids whose groups share a prompt, in an order that keeps no group together."""
    rng = np.random.default_rng([seed, 6])
    prompts = {g: rng.integers(0, 151_000, n) for g, n in zip(group.tolist(), prompt.tolist(), strict=True)}
    rows = []
    for i, (g, n) in enumerate(zip(group.tolist(), completion.tolist(), strict=True)):
        zeros = np.zeros(n, np.float32)
        rows.append(
            Sample(
                group_id=str(g),
                rollout_id=str(i),
                segment=0,
                step=0,
                prompt_ids=prompts[g],
                response_ids=rng.integers(0, 151_000, n),
                loss_mask=np.ones(n, np.bool_),
                logprobs=zeros,
                advantages=zeros,
                weight=1.0,
            )
        )
    return rows


def tree(key: Balance, prompt: Ints, completion: Ints, group: Ints, seed: int) -> dict[str, float]:
    """The figures of the plan that knows of prefixes; its load is counted from the lengths and groups."""
    mixed = np.random.default_rng([seed, 7]).permutation(len(prompt))
    prompt, completion, group = prompt[mixed], completion[mixed], group[mixed]
    samples = make_samples(prompt, completion, group, seed)
    cost = cost_of(key, HIDDEN)
    plans, seconds = timed(
        lambda: plan_step(samples, ranks=RANKS, layout="tree", micro_tokens=BUDGET, cost=cost),
    )

    def unique(micro: MicroBatch) -> float:
        rows = list(micro.samples)
        _, first = np.unique(group[rows], return_index=True)
        return float(completion[rows].sum() + prompt[rows][first].sum())

    load = grid(plans, unique)
    _, first = np.unique(group, return_index=True)
    real = int((prompt + completion).sum())
    placed = np.bincount(
        [row for plan in plans for m in plan if not m.masked for row in m.samples], minlength=len(prompt)
    )
    rows = {
        "micro_batches": load.shape[0],
        "straggler": uneven(load),
        "saved": 1 - load.sum() / real,
        "saved_bound": (prompt.sum() - prompt[first].sum()) / real,
        "most_tokens": load.max(),
        "lost_or_twice": int((placed != 1).sum()),
        "us_a_sample": seconds / len(prompt) * 1e6,
    }
    return {f"tree_{key}_{name}": float(value) for name, value in rows.items()}


def main() -> None:
    args = arguments(__doc__ or "")
    module = load_workloads(args.workloads)
    prompt, completion, group = module.rl_lengths(seed=args.seed)
    lengths = prompt + completion
    listed = lengths.tolist()
    figures = judge("strided", strided(len(listed)), lengths, 0.0, module)
    for key in KEYS:
        cost = cost_of(key, HIDDEN)
        for name, choice in (("fixed", {"micro_samples": ROWS}), ("budget", {"micro_tokens": BUDGET})):
            plans, seconds = timed(lambda: plan_lengths(listed, ranks=RANKS, layout="packed", cost=cost, **choice))  # noqa: B023
            figures |= judge(f"{name}_{key}", plans, lengths, seconds, module)
    plans, seconds = timed(
        lambda: plan_lengths(listed, ranks=RANKS, micro_tokens=BUDGET, layout="padded", cost=cost_of("flops", HIDDEN))
    )
    figures |= judge("padded_budget", plans, lengths, seconds, module, padded=True)
    figures["padded_budget_padded_over_real"] = padded_tokens(plans, lengths)
    figures["strided_padded_over_real"] = padded_tokens(strided(len(listed)), lengths)
    for key in KEYS[::2]:
        figures |= tree(key, prompt, completion, group, args.seed)
    least = -(-int(lengths.sum()) // (RANKS * BUDGET))
    report(
        "planning",
        figures=figures,
        reference=REFERENCE,
        goals={
            "fixed: straggler": at_most(figures["fixed_flops_straggler"], 1.005),
            "fixed: us a sample": at_most(figures["fixed_flops_us_a_sample"], 10),
            "fixed on L^2: imbalance": at_most(figures["fixed_square_imbalance"], 0.022),
            "budget: micro-batches": at_most(figures["budget_flops_micro_batches"], max(51, least)),
            "budget: straggler": at_most(figures["budget_flops_straggler"], 1.005),
            "budget: rows without a sample": at_most(figures["budget_flops_masked_rows"], 0),
            "budget: samples lost or twice": at_most(figures["budget_flops_lost_or_twice"], 0),
            "budget: most tokens in a row": at_most(figures["budget_flops_most_tokens"], BUDGET),
            "budget: us a sample": at_most(figures["budget_flops_us_a_sample"], 20),
            "tree: tokens saved": at_least(figures["tree_length_saved"], 0.14),
            "tree: straggler on unique tokens": at_most(figures["tree_length_straggler"], 1.05),
            "tree: samples lost or twice": at_most(figures["tree_length_lost_or_twice"], 0),
            "tree: us a sample": at_most(figures["tree_length_us_a_sample"], 50),
            "tree: most tokens in a row": at_most(figures["tree_length_most_tokens"], BUDGET),
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
