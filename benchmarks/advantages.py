"""Nanoseconds a sample of once-per-rollout baselines, and whether they are right under fan-out and shuffle.

`python -m benchmarks.advantages [--json] [--workloads FILE.py] [--seed N]`
"""

import time
from typing import Any

import numpy as np

from agentgym.advantages import advantages
from benchmarks.harness import arguments, at_most, load_workloads, report

REFERENCE: dict[str, float | str] = {
    "verl_ns": 10_179.0,
    "verl_vectorised_ns": 112.0,
    "skyrl_flat_ns": 12_396.0,
    "skyrl_step_wise_ns": 6_209.0,
    "trl_reshape_ns": 58.0,
    "miles_ns": 4_531.0,
    "numpy_bound_ns": 35.0,
    "right under fan-out and shuffle": "miles",
}
RUNS = 15


def measure(rows: dict[str, Any], expected: Any) -> tuple[float, float]:
    """CPU nanoseconds a sample, the median of the runs, and the largest error."""
    ids = (rows["reward"], rows["rollout"], rows["prompt"])
    seconds = []
    for _ in range(RUNS):
        began = time.process_time()
        got = advantages(*ids, estimator="grpo")
        seconds.append(time.process_time() - began)
    return float(np.median(seconds)) / len(got) * 1e9, float(np.abs(got - expected).max())


def main() -> None:
    args = arguments(__doc__ or "")
    module = load_workloads(args.workloads)
    figures: dict[str, float] = {}
    for name, choice in {"fan": {}, "shuffled": {"shuffle": True}, "rigid": {"fan": False}}.items():
        rows = module.fanout(seed=args.seed, **choice)
        rows.pop("is_last")
        figures[f"{name}_ns"], figures[f"{name}_error"] = measure(rows, module.fanout_reference(**rows))
        named = {key: rows[key].astype(str).tolist() for key in ("rollout", "prompt")}
        figures[f"{name}_string_ids_ns"], _ = measure(rows | named, module.fanout_reference(**rows))
    slowest = max(figures[f"{name}_ns"] for name in ("fan", "shuffled", "rigid"))
    error = max(figures[f"{name}_error"] for name in ("fan", "shuffled", "rigid"))
    report(
        "advantages",
        figures=figures,
        reference=REFERENCE,
        goals={"CPU ns a sample, int ids": at_most(slowest, 150), "largest error": at_most(error, 1e-9)},
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
