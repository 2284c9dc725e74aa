"""How even a plan is between ranks, and what it takes to make: 4,096 samples, 8 ranks.

`python -m benchmarks.planning [--json] [--workloads FILE.py] [--seed N] [--peers VENV]`

Imbalance is the mean over micro-batches of (largest - smallest) / mean of the ranks' sums of L^2; straggler is the sum
of the slowest ranks' costs over the costs' even share, in FLOPs of a 4B model (of padded rows where they are padded; in
unique tokens under `tree`). Seconds are CPU seconds, the least of 5 runs of each planner, the
other kits' after ours.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentgym.train.batching.plan import Balance, MicroBatch, cost_of, plan_lengths, plan_step
from agentgym.types import Ints, Sample
from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, report
from benchmarks.peers.turns import peers_python, worker

KEYS: tuple[Balance, ...] = ("flops", "square", "length")
RANKS, ROWS, BUDGET, HIDDEN, ROUNDS = 8, 8, 16_384, 2560, 5
TRL_SAMPLES = 512
"""trl's planner builds a trie of Python objects of every token: it gets the first samples alone."""
REFERENCE: dict[str, float | str] = {
    "miles": "is not on PyPI; on other machines first-fit took 51 micro-batches of 51 at 8 us and a straggler of 1.017",
}

Plan = Sequence[Sequence[MicroBatch]]
"""Micro-batches of each rank."""


def timed(plan: Callable[[], Plan]) -> tuple[Plan, float]:
    """The plan, and the least CPU seconds it took."""
    seconds = []
    for _ in range(ROUNDS):
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


def peers_figures(args: argparse.Namespace, module: Any, lengths: Ints) -> dict[str, float]:
    """The plans of other kits, each the least of as many rounds as ours; none where they are not installed."""
    python = peers_python(args.peers)
    if python is None:
        return {}
    figures: dict[str, float] = {}
    asked = {
        "workloads": str(args.workloads.absolute()) if args.workloads else None,
        "seed": args.seed,
        "ranks": RANKS,
        "rows": ROWS,
        "budget": BUDGET,
        "trl_samples": TRL_SAMPLES,
    }
    with worker(python, "benchmarks.planning.theirs", asked) as peers:
        for way in peers.start():
            seconds = min(peers.once(way).cpu_s for _ in range(ROUNDS))
            mine = lengths[:TRL_SAMPLES] if way.startswith("trl") else lengths
            figures |= judge(way, _plan_of(peers.tell(way)), mine, seconds, module)
    return figures


def _plan_of(told: list[list[list[int]]]) -> Plan:
    """A plan in our types: a micro-batch without samples is padding, which computes the first sample again."""
    return [[MicroBatch(samples=tuple(part) or (0,), masked=not part) for part in rank] for rank in told]


def goals(f: dict[str, float], least: int) -> dict[str, Goal]:
    """What the figures should be. A goal that needs another kit is not measured where that is not installed."""

    def times(kit: str, ours: str) -> float | None:
        return f[f"{kit}_us_a_sample"] / f[f"{ours}_us_a_sample"] if f"{kit}_us_a_sample" in f else None

    def wait(kit: str, ours: str) -> float | None:
        return (f[f"{ours}_straggler"] - 1) / (f[f"{kit}_straggler"] - 1) if f"{kit}_straggler" in f else None

    return {
        "fixed: straggler": at_most(f["fixed_flops_straggler"], 1.002),
        "fixed: time that ranks wait, share of verl's": at_most(wait("verl_fixed", "fixed_flops"), 0.1),
        "fixed: times verl's speed": at_least(times("verl_fixed", "fixed_flops"), 1.0),
        "fixed on L^2: imbalance": at_most(f["fixed_square_imbalance"], 0.022),
        "budget: micro-batches over the least there can be": at_most(f["budget_flops_micro_batches"] / least, 1.0),
        "budget: straggler": at_most(f["budget_flops_straggler"], 1.001),
        "budget: time that ranks wait, share of verl's": at_most(wait("verl_budget", "budget_flops"), 1.0),
        "budget: times verl's speed": at_least(times("verl_budget", "budget_flops"), 50.0),
        "budget: rows without a sample": at_most(f["budget_flops_masked_rows"], 0),
        "budget: samples lost or twice": at_most(f["budget_flops_lost_or_twice"], 0),
        "budget: most tokens in a row": at_most(f["budget_flops_most_tokens"], BUDGET),
        "budget: us a sample": at_most(f["budget_flops_us_a_sample"], 10),
        "tree: tokens saved, share of the bound": at_least(f["tree_length_saved"] / f["tree_length_saved_bound"], 0.89),
        "tree: straggler on unique tokens": at_most(f["tree_length_straggler"], 1.01),
        "tree: times trl's speed": at_least(times("trl_budget", "tree_length"), 30.0),
        "tree: samples lost or twice": at_most(f["tree_length_lost_or_twice"], 0),
        "tree: most tokens in a row": at_most(f["tree_length_most_tokens"], BUDGET),
    }


def main() -> None:
    args = arguments(__doc__ or "", peers=True)
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
    figures |= peers_figures(args, module, lengths)
    least = -(-int(lengths.sum()) // (RANKS * BUDGET))
    figures["budget_least_micro_batches"] = float(least)
    report("planning", figures=figures, reference=REFERENCE, goals=goals(figures, least), as_json=args.json)


if __name__ == "__main__":
    main()
