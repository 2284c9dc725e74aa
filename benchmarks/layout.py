"""Tokens, CPU seconds and memory of step samples in each layout, and what a forward and backward of them costs.

`python -m benchmarks.layout [--json] [--workloads FILE.py] [--seed N]`
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from agentgym.train.batching.batch import Batch, collate
from agentgym.types import Sample
from benchmarks.forward import forward_backward
from benchmarks.harness import Cost, Goal, arguments, at_least, at_most, cost, fresh, load_workloads, report
from benchmarks.merging import merge
from benchmarks.rows import make_samples

REFERENCE: dict[str, float | str] = {
    "skyrl_left_pad_cpu_s": 9.5,
    "skyrl_left_pad_peak_mib": 1725.0,
    "skyrl_merge_left_pad_cpu_s": 2.2,
    "skyrl_merge_left_pad_peak_mib": 394.0,
    "skyrl_stepwise_over_whole_trajectories": 4.0,
    "trl_prefix_trie_rows_cpu_s": 14.2,
    "trl_prefix_trie_rows_peak_mib": 1117.0,
    "trl_prefix_trie_rows_tokens_over_unique": 1.0002,
    "numpy_bound_cpu_s": 1.09,
    "numpy_bound_peak_mib": 984.0,
    "numpy_bound_packed_merged_cpu_s": 0.23,
    "published_memory_ratio": 1.37,
    "where": "4,096 samples, one thread",
}


def padded(rows: Sequence[Sample], pad_id: int) -> list[Batch]:
    """One left-padded block."""
    return [collate(rows, pad_id=pad_id)]


def merged(rows: Sequence[Sample], pad_id: int) -> list[Batch]:
    """One left-padded block of the samples with their turns merged."""
    return [collate(merge(rows), pad_id=pad_id)]


def packed_merged(rows: Sequence[Sample], pad_id: int) -> list[Batch]:
    """One row without padding, turns merged."""
    return [collate(merge(rows), pad_id=pad_id, layout="packed")]


def tree(rows: Sequence[Sample], pad_id: int) -> list[Batch]:
    """A forest for each group, as micro-batches that hold a group are."""
    groups: dict[str, list[Sample]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    return [collate(group, pad_id=pad_id, layout="tree") for group in groups.values()]


WAYS: dict[str, Callable[[Sequence[Sample], int], list[Batch]]] = {
    way.__name__: way for way in (padded, merged, packed_merged, tree)
}


def from_lists(workloads: Path | None, seed: int, preset: str, way: str) -> Cost:
    """Cost of lists of numbers to tensors: what the peers' figures are of."""
    torch.set_num_threads(1)
    module = load_workloads(workloads)
    batch = module.stepwise(seed=seed, **module.STEP_PRESETS[preset])
    return cost(lambda: WAYS[way](make_samples(batch), module.PAD))


def from_samples(workloads: Path | None, seed: int, preset: str, way: str) -> tuple[Cost, int]:
    """Cost of samples to tensors, what a training step pays, and the tokens that are to be computed."""
    torch.set_num_threads(1)
    module = load_workloads(workloads)
    rows = make_samples(module.stepwise(seed=seed, **module.STEP_PRESETS[preset]))
    spent = cost(lambda: WAYS[way](rows, module.PAD))
    return spent, sum(batch.inputs.input_ids_BT.numel() for batch in WAYS[way](rows, module.PAD))


def counted(workloads: Path | None, seed: int, preset: str) -> dict[str, int]:
    """The workload's own count of its tokens."""
    module = load_workloads(workloads)
    found: dict[str, int] = module.token_counts(module.stepwise(seed=seed, **module.STEP_PRESETS[preset]))
    return found


def collation(workloads: Path | None, seed: int) -> dict[str, float]:
    """Tokens, CPU seconds and MiB by preset and way."""
    figures: dict[str, float] = {}
    for preset in ("skyrl", "agentic"):
        count = fresh(counted, workloads, seed, preset)
        names = {"real": "step", "merged": "merged", "tree": "unique", "padded_two_segment": "two_segment"}
        figures |= {f"{preset}_{ours}_tokens": float(count[theirs]) for theirs, ours in names.items()}
        for way in WAYS:
            spent, tokens = fresh(from_samples, workloads, seed, preset, way)
            figures[f"{preset}_{way}_row_tokens"] = float(tokens)
            figures |= {f"{preset}_{way}_cpu_s": spent.cpu_s, f"{preset}_{way}_peak_mib": spent.peak_mib}
    for way in ("padded", "packed_merged", "tree"):
        spent = fresh(from_lists, workloads, seed, "skyrl", way)
        figures |= {f"skyrl_lists_{way}_cpu_s": spent.cpu_s, f"skyrl_lists_{way}_peak_mib": spent.peak_mib}
    return figures


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """What the figures should be."""
    f = figures
    whole = f["step_packed_whole_cpu_s"]
    return {
        "two-segment / left-padded tokens": at_least(
            f["skyrl_two_segment_tokens"] / f["skyrl_padded_row_tokens"], 1.35
        ),
        "lists to block, CPU s (skyrl's / 6)": at_most(f["skyrl_lists_padded_cpu_s"], 9.5 / 6),
        "lists to block, peak MiB (skyrl's x .6)": at_most(f["skyrl_lists_padded_peak_mib"], 0.6 * 1725),
        "samples to block, CPU s (skyrl's / 6)": at_most(f["skyrl_padded_cpu_s"], 9.5 / 6),
        "samples to block, peak MiB (skyrl's x .6)": at_most(f["skyrl_padded_peak_mib"], 0.6 * 1725),
        "merge and pack, CPU s (skyrl's merge / 7)": at_most(f["skyrl_packed_merged_cpu_s"], 2.2 / 7),
        "lists, merge and pack, CPU s (skyrl's / 7)": at_most(f["skyrl_lists_packed_merged_cpu_s"], 2.2 / 7),
        "packed / merged tokens": at_most(f["skyrl_packed_merged_row_tokens"] / f["skyrl_merged_tokens"], 1.0),
        "tree / unique tokens": at_most(f["skyrl_tree_row_tokens"] / f["skyrl_unique_tokens"], 1.001),
        "tree / unique tokens, with forks": at_most(f["agentic_tree_row_tokens"] / f["agentic_unique_tokens"], 1.001),
        "samples to tree, CPU s (trl's / 20)": at_most(f["skyrl_tree_cpu_s"], 14.2 / 20),
        "lists to tree, CPU s (trl's / 20)": at_most(f["skyrl_lists_tree_cpu_s"], 14.2 / 20),
        "turns, merged and packed / whole, CPU": at_most(f["step_packed_merged_cpu_s"] / whole, 1.1),
        "turns as a tree / whole packed, CPU": at_most(f["step_tree_turns_cpu_s"] / whole, 1.1),
        "turns padded / turns as a tree, CPU": at_least(f["step_padded_turns_cpu_s"] / f["step_tree_turns_cpu_s"], 4.0),
    }


def main() -> None:
    args = arguments(__doc__ or "")
    figures = collation(args.workloads, args.seed) | fresh(forward_backward, args.workloads, args.seed)
    report("layout", figures=figures, reference=REFERENCE, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
