"""CPU time and errors of advantages that count each rollout once, compared with other kits.

`python -m benchmarks.advantages [--json] [--workloads FILE.py] [--seed N] [--peers VENV]`

Times are CPU nanoseconds per sample, the least of equally many rounds in which all functions take turns. The shapes are
fan-out (rollouts with several samples), shuffled fan-out, and one sample per rollout. A kit whose error is above 1e-3
is wrong: no goal compares with it.
"""

from functools import partial
from typing import Any

import numpy as np

from agentgym.advantages.group import advantages
from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, report, workloads_path
from benchmarks.peers.turns import Worker, in_its_environment, least_cpu_s

REFERENCE: dict[str, float | str] = {
    "trl": "computes them inside a method of its trainer, for groups of one size only",
    "miles": "is not on PyPI",
}
SHAPES: dict[str, dict[str, bool]] = {"fan": {}, "shuffled": {"shuffle": True}, "rigid": {"fan": False}}
ROUNDS = 5
RIGHT = 1e-3
"""Largest error that float32 arithmetic explains; a kit with a larger one is wrong."""


def answer(rows: dict[str, Any]) -> Any:
    """Return our advantages of these columns."""
    return advantages(rows["reward"], rows["rollout"], rows["prompt"], estimator="grpo")


def ours(module: Any, seed: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return the columns of each shape, with integer and with string ids, and their right advantages."""
    found: dict[str, tuple[dict[str, Any], Any]] = {}
    for name, choice in SHAPES.items():
        rows = module.fanout(seed=seed, **choice)
        rows.pop("is_last")
        expected = module.fanout_reference(**rows)
        named = {
            "rollout": [f"task-{number}" for number in rows["rollout"].tolist()],
            "prompt": [f"task-{number}" for number in rows["prompt"].tolist()],
        }
        found |= {name: (rows, expected), f"{name}_string_ids": (rows | named, expected)}
    return found


def measure(work: dict[str, tuple[dict[str, Any], Any]], peers: Worker | None, size: int) -> dict[str, float]:
    """Return the least nanoseconds per sample and the largest error of every function and shape."""
    ways = {name: partial(answer, rows) for name, (rows, _) in work.items()}
    seconds = least_cpu_s(ways, peers, ROUNDS)
    errors = {name: float(np.abs(ways[name]() - expected).max()) for name, (_, expected) in work.items()}
    errors |= {name: peers.tell(name) for name in peers.start()} if peers is not None else {}
    sizes = {name: len(expected) for name, (_, expected) in work.items()}
    figures = {f"{name}_ns": spent / sizes.get(name, size) * 1e9 for name, spent in seconds.items()}
    return figures | {f"{name}_error": error for name, error in errors.items()}


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """Return the goals; for each, the worst shape counts.

    Without fan-out every kit is right, so we are compared with the fastest kit for the same kind of ids.
    """
    found: dict[str, Goal] = {}
    for title, ids in (("int ids", ""), ("string ids", "_string_ids")):
        mine = f"rigid{ids}_ns"
        kits = [value for name, value in figures.items() if name.endswith(f"_{mine}") and _right(figures, name)]
        found[f"without fan-out, {title}, times the fastest kit's speed"] = at_least(
            min(kits) / figures[mine] if kits else None, 1
        )
    wrong = [figures[f"{name}{ids}_error"] for name in SHAPES for ids in ("", "_string_ids")]
    slowest = max(figures[f"{name}_string_ids_ns"] for name in SHAPES)
    return found | {
        "CPU ns a sample, string ids": at_most(slowest, 100),
        "largest error": at_most(max(wrong), 1e-9),
    }


def _right(figures: dict[str, float], name: str) -> bool:
    return figures[f"{name.removesuffix('_ns')}_error"] < RIGHT


def main() -> None:
    args = arguments(__doc__ or "", peers=True)
    module = load_workloads(args.workloads)
    work = ours(module, args.seed)
    asked = {"workloads": workloads_path(args), "seed": args.seed, "shapes": SHAPES}
    with in_its_environment(args.peers, "benchmarks.advantages.theirs", asked) as peers:
        figures = measure(work, peers, len(work["fan"][1]))
    report("advantages", figures=figures, reference=REFERENCE, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
