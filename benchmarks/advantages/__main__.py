"""Nanoseconds a sample of once-per-rollout baselines beside other kits, and who is right under fan-out and shuffle.

`python -m benchmarks.advantages [--json] [--workloads FILE.py] [--seed N] [--peers VENV]`

CPU nanoseconds a sample, the least of as many rounds for each, in turns. A kit whose error is above 1e-3 is wrong: no
goal is a ratio to it.
"""

import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from agentgym.advantages import advantages
from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, report
from benchmarks.peers.turns import Worker, peers_python, worker

REFERENCE: dict[str, float | str] = {
    "trl": "divides rewards that lie in groups of one size, inside of a method of its trainer",
    "miles": "is not on PyPI",
}
SHAPES: dict[str, dict[str, bool]] = {"fan": {}, "shuffled": {"shuffle": True}, "rigid": {"fan": False}}
ROUNDS = 5
RIGHT = 1e-3
"""Largest error of float32 arithmetic in a kit that is right."""


def once(rows: dict[str, Any], expected: Any) -> tuple[float, float]:
    """CPU nanoseconds a sample of one call, and the largest error."""
    began = time.process_time()
    got = advantages(rows["reward"], rows["rollout"], rows["prompt"], estimator="grpo")
    seconds = time.process_time() - began
    return seconds / len(got) * 1e9, float(np.abs(got - expected).max())


def ours(module: Any, seed: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """The columns of each shape, with ids of both kinds, and the right answers."""
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
    """The least nanoseconds and the largest error of every way."""
    figures: dict[str, float] = {}
    theirs = peers.start() if peers is not None else []
    for _ in range(ROUNDS):
        for name, (rows, expected) in work.items():
            spent, figures[f"{name}_error"] = once(rows, expected)
            figures[f"{name}_ns"] = min(spent, figures.get(f"{name}_ns", spent))
        for name in theirs:
            assert peers is not None
            spent = peers.once(name).cpu_s / size * 1e9
            figures[f"{name}_ns"] = min(spent, figures.get(f"{name}_ns", spent))
    return figures | {f"{name}_error": peers.tell(name) for name in theirs if peers is not None}


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """What the figures should be; of the shapes the worst counts.

    Without fan-out every kit is right: there the fastest counts, with ids of the same kind.
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
    path = str(args.workloads.absolute()) if args.workloads else None
    work = ours(module, args.seed)
    with ExitStack() as stack:
        peers = None
        if python := peers_python(args.peers):
            asked = {"workloads": path, "seed": args.seed, "shapes": SHAPES}
            peers = stack.enter_context(worker(python, "benchmarks.advantages.theirs", asked))
        figures = measure(work, peers, len(work["fan"][1]))
    report("advantages", figures=figures, reference=REFERENCE, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
