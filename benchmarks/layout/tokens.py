"""The number of tokens in a workload of step samples."""

from pathlib import Path

from benchmarks.harness import load_workloads


def counted(workloads: Path | None, seed: int, preset: str) -> dict[str, float]:
    """Return the workload's own counts of its tokens."""
    module = load_workloads(workloads)
    count = module.token_counts(module.stepwise(seed=seed, **module.STEP_PRESETS[preset]))
    names = {"real": "step", "merged": "merged", "tree": "unique", "padded_two_segment": "two_segment"}
    return {f"{preset}_{ours}_tokens": float(count[theirs]) for theirs, ours in names.items()}
