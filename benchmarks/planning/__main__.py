"""Evenness of plans that distribute 4,096 samples over 8 ranks, and the CPU time of planning.

`python -m benchmarks.planning [--json] [--workloads FILE.py] [--seed N] [--peers VENV]`

Imbalance is the mean over micro-batches of (largest - smallest) / mean of the ranks' sums of L^2. Straggler is the
sum of the slowest ranks' costs divided by the sum for evenly shared costs, in FLOPs of a 4B model (of padded rows in
the padded layout; in unique tokens under `tree`). Seconds are CPU seconds, the least of 5 rounds in which all
planners take turns; those of other kits run in a separate process.
"""

import argparse
from typing import Any

from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, over, report, workloads_path
from benchmarks.peers.turns import Worker, in_its_environment, least_cpu_s
from benchmarks.planning.judging import judge, judge_tree, padded_tokens
from benchmarks.planning.ours import BUDGET, RANKS, ROWS, Lengths, plans_of_lengths, plans_of_prefixes, strided

ROUNDS = 5
TRL_SAMPLES = 512
"""Samples for trl's planner: it builds a trie of Python objects for every token, so it gets only the first ones."""
REFERENCE: dict[str, float | str] = {
    "miles": "is not on PyPI; on other machines first-fit took 51 micro-batches of 51 at 8 us and a straggler of 1.017",
}


def goals(f: dict[str, float], least: int) -> dict[str, Goal]:
    """Return the goals; those that need another kit are not measured if it isn't installed."""

    def times(kit: str, ours: str) -> float | None:
        return over(f, f"{kit}_us_a_sample", f"{ours}_us_a_sample")

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


def measure(of: Lengths, peers: Worker | None, module: Any, seed: int) -> dict[str, float]:
    """Return the results of every planner, ours and the other kits'."""
    mixed, lengths = of.mixed(seed), of.whole
    by_length, by_prefix = plans_of_lengths(lengths), plans_of_prefixes(mixed, seed)
    seconds = least_cpu_s(by_length | {f"tree_{key}": make for key, make in by_prefix.items()}, peers, ROUNDS)
    figures = judge("strided", strided(len(lengths)), lengths, 0.0, module)
    figures["strided_padded_over_real"] = padded_tokens(strided(len(lengths)), lengths)
    for name, make in by_length.items():
        figures |= judge(name, make(), lengths, seconds[name], module, padded=name == "padded_budget")
    figures["padded_budget_padded_over_real"] = padded_tokens(by_length["padded_budget"](), lengths)
    for key, make in by_prefix.items():
        figures |= judge_tree(key, make(), mixed, seconds[f"tree_{key}"])
    if peers is not None:
        for name in peers.start():
            mine = lengths[:TRL_SAMPLES] if name.startswith("trl") else lengths
            figures |= judge(name, peers.tell(name), mine, seconds[name], module)
    return figures


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return the samples that the other kits should plan."""
    return {
        "workloads": workloads_path(args),
        "seed": args.seed,
        "ranks": RANKS,
        "rows": ROWS,
        "budget": BUDGET,
        "trl_samples": TRL_SAMPLES,
    }


def main() -> None:
    args = arguments(__doc__ or "", peers=True)
    module = load_workloads(args.workloads)
    of = Lengths(*module.rl_lengths(seed=args.seed))
    with in_its_environment(args.peers, "benchmarks.planning.theirs", _asked(args)) as peers:
        figures = measure(of, peers, module, args.seed)
    least = -(-int(of.whole.sum()) // (RANKS * BUDGET))
    figures["budget_least_micro_batches"] = float(least)
    report("planning", figures=figures, reference=REFERENCE, goals=goals(figures, least), as_json=args.json)


if __name__ == "__main__":
    main()
