"""Tokens, CPU seconds and memory of step samples in each layout, compared with other kits.

`python -m benchmarks.layout [--json] [--quick] [--workloads FILE.py] [--seed N] [--peers VENV]`

For each way of making batches, three processes take turns: ours from Python lists, ours from the rollouts that a driver
returns, and the other kit's from Python lists (trl's from tensors). Seconds are the least of equally many rounds.
`same` is 1 if all three trained the same: the trained ids, their positions and log-probabilities are equal in every
sample, and in blocks also the ids and masks of whole rows. Then a small model runs a forward and backward pass over
samples. With `--quick` the shape is small, and this pass is left out.
"""

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks.harness import Goal, arguments, at_least, at_most, fresh, load_workloads, over, report, workloads_path
from benchmarks.layout.forward import forward_backward
from benchmarks.layout.tokens import counted
from benchmarks.peers.turns import in_turns, peers_python

REFERENCE: dict[str, float | str] = {
    "skyrl_stepwise_over_whole_trajectories": 4.0,
    "published_memory_ratio": 1.37,
}
WAYS = {"padded": "skyrl", "merged": "skyrl", "packed": "skyrl", "tree": "trl"}
"""The ways, and the kit that does the most similar work: skyrl's merged block is compared with our packed row."""
AIMS = {
    ("padded", "lists"): 5.0,
    ("padded", "segments"): 10.0,
    ("merged", "lists"): 2.0,
    ("merged", "segments"): 5.0,
    ("packed", "segments"): 5.0,
    ("tree", "segments"): 30.0,
}
"""Goal for the other kit's CPU seconds divided by ours."""


def presets(module: Any, *, quick: bool) -> list[str]:
    """Return the workload's presets to measure: the two large ones if it has them, else all."""
    wanted = ("tiny",) if quick else ("skyrl", "agentic")
    return [name for name in wanted if name in module.STEP_PRESETS] or list(module.STEP_PRESETS)


def measure(args: argparse.Namespace, preset: str, way: str, rounds: int) -> dict[str, float]:
    """Measure one way of ours from lists and from segments, and of the other kit if it is installed."""
    choice = load_workloads(args.workloads).STEP_PRESETS[preset]
    work = {"workloads": workloads_path(args), "seed": args.seed, "preset": choice, "way": way}
    ours = "benchmarks.layout.ours"
    starts: dict[str, Any] = {
        source: (sys.executable, ours, work | {"source": source}) for source in ("lists", "segments")
    }
    if python := peers_python(args.peers):
        theirs = work | {"way": "merged" if way == "packed" else way}
        starts[WAYS[way]] = (python, "benchmarks.layout.theirs", theirs)
    figures: dict[str, float] = {}
    found = in_turns(starts, rounds)
    for name, one in found.items():
        figures |= {f"{preset}_{way}_{name}_{key}": one[key] for key in ("cpu_s", "peak_mib")}
        figures |= {f"{preset}_{way}_{name}_{key}": float(one["told"][key]) for key in ("tokens", "real")}
    figures[f"{preset}_{way}_same"] = float(_same([one["told"] for one in found.values()]))
    kit = WAYS[way]
    if kit in found:
        for source in ("lists", "segments"):
            for key, title in (("cpu_s", "ratio"), ("peak_mib", "peak_ratio")):
                one, other = found[source][key], found[kit][key]
                value = other / one if key == "cpu_s" else one / other
                figures[f"{preset}_{way}_{source}_{title}"] = value
    return figures


def _same(told: list[dict[str, Any]]) -> bool:
    """Return whether all processes trained the same, and had equal rows if they report rows."""
    keys = ("trained", "trained_tokens", "rows")
    return all(len({str(one[key]) for one in told if key in one}) <= 1 for key in keys)


def goals(figures: dict[str, float], names: list[str]) -> dict[str, Goal]:
    """Return the goals; the worst of several presets counts."""
    f = figures
    found: dict[str, Goal] = {}
    for (way, source), aim in AIMS.items():
        ratios = _of(f, names, f"{way}_{source}_ratio")
        found[f"{way} from {source}, times {WAYS[way]}'s speed"] = at_least(min(ratios) if ratios else None, aim)
    for source in ("lists", "segments"):
        peaks = _of(f, names, f"padded_{source}_peak_ratio")
        found[f"padded from {source}, share of skyrl's peak"] = at_most(max(peaks) if peaks else None, 0.5)
    same = min(f[f"{name}_{way}_same"] for name in names for way in WAYS)
    blocks = [f[f"{name}_two_segment_tokens"] / f[f"{name}_padded_lists_tokens"] for name in names]
    packed = [f[f"{name}_packed_lists_tokens"] / f[f"{name}_merged_tokens"] for name in names]
    unique = [f[f"{name}_tree_lists_tokens"] / f[f"{name}_unique_tokens"] for name in names]
    return found | {
        "all have trained the same": at_least(same, 1),
        "two-segment / left-padded tokens": at_least(min(blocks), 1.35),
        "packed / merged tokens": at_most(max(packed), 1.0),
        "tree / unique tokens": at_most(max(unique), 1.001),
        "turns, merged and packed / whole, CPU": at_most(_over(f, "packed_merged", "packed_whole"), 1.1),
        "turns as a tree / whole packed, CPU": at_most(_over(f, "tree_turns", "packed_whole"), 1.1),
        "turns padded / turns as a tree, CPU": at_least(_over(f, "padded_turns", "tree_turns"), 4.0),
    }


def _over(figures: dict[str, float], one: str, other: str) -> float | None:
    """Return one step's CPU seconds divided by another's, or None if no step was measured."""
    return over(figures, f"step_{one}_cpu_s", f"step_{other}_cpu_s")


def _of(figures: dict[str, float], names: Iterable[str], key: str) -> list[float]:
    return [figures[f"{name}_{key}"] for name in names if f"{name}_{key}" in figures]


def main() -> None:
    args = arguments(__doc__ or "", quick=True, peers=True)
    names = presets(load_workloads(args.workloads), quick=args.quick)
    figures: dict[str, float] = {}
    for preset in names:
        figures |= fresh(counted, args.workloads, args.seed, preset)
        for way in WAYS:
            figures |= measure(args, preset, way, rounds=2 if args.quick else 5)
    if not args.quick:
        figures |= fresh(forward_backward, args.workloads, args.seed)
    report("layout", figures=figures, reference=REFERENCE, goals=goals(figures, names), as_json=args.json)


if __name__ == "__main__":
    main()
