"""Rollout workers on Ray: rollouts per second with 1, 2 and 4 of them, their cost, and the driver's limit.

`python -m benchmarks.scale [--json] [--workloads FILE.py] [--at-once N] [--quick] [--seed N]`

It needs `pip install '.[ray]'`.

Cluster, workers, scheduler, samples and store are those of a run. A rollout has 8 turns and about 2,000 sampled
tokens from responses that are ready; for the rest of its time a tool sleeps. Each call sleeps as long as one of the
turns that the embedded engine samples beforehand, 8 at once; a file of workloads has `turn_seconds(seed)` instead.
Nothing is trained: an actor responds as a training process does.

The driver's CPU time is that of its process, including Ray's threads. `collect` is its time for sending requests to the
workers, unpacking their results and joining them. `step` is its time for everything else that a run's driver does with
a batch: making the samples, sending them to the training processes and getting the log-probabilities back, the store,
and the step's metrics.

The numbers of workers take turns, and with them batches of twice as many rollouts on 2 workers; the best batch of
each counts. Then `--at-once` rollouts (10,000) run at once on 4 workers, for one batch. Many workers with 64 rollouts
each are simulated with the costs of that batch and with rollouts `x` times as long: the workers run one batch ahead,
and the driver does one thing at a time.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness import Goal, at_least, at_most, load_workloads, report, report_parser
from benchmarks.scale.measure import (
    SLOTS,
    TURNS,
    Batch,
    Costs,
    Size,
    all_at_once,
    by_size,
    local_ray,
    turn_seconds,
)
from benchmarks.scale.simulation import simulated

SIZES = (Size(1), Size(2), Size(4), Size(2, rounds=2 * Size(1).rounds))
AT_ONCE = 10_000
LONGER = (1, 2, 4, 8, 16, 32)
"""How many times longer the rollouts of the simulation are."""


def best(batches: Sequence[Batch]) -> tuple[float, Costs]:
    """Return the highest rate of rollouts per second, and the least of each cost."""
    costs = [batch.costs for batch in batches]
    least = {name: min(getattr(each, name) for each in costs) for name in ("collect", "step", "workers", "ray")}
    return max(batch.rate for batch in batches), Costs(**least)


def of_sizes(found: Mapping[Size, Sequence[Batch]]) -> tuple[dict[str, float], dict[str, Goal]]:
    """Return the results and the goals of the sizes."""
    figures = dict[str, float]()
    rates, costs = dict[Size, float](), dict[Size, Costs]()
    for size, batches in found.items():
        rate, cost = rates[size], costs[size] = best(batches)
        played = max(batches, key=lambda batch: batch.rate).played_s
        settings = {"at_once": size.workers * SLOTS, "slots": SLOTS, "rounds": size.rounds}
        name = str(size.workers) if size.rounds == Size(1).rounds else f"{size.workers}_twice"
        figures |= {
            f"rollouts_per_s_{name}": rate,
            f"simulated_rollouts_per_s_{name}": simulated(played, cost, ahead=False, **settings).rate,
            f"driver_collect_ms_{name}": cost.collect,
            f"driver_step_ms_{name}": cost.step,
            f"workers_ms_{name}": cost.workers,
            f"ray_ms_{name}": cost.ray,
            f"driver_pause_s_{name}": min(batch.pause_s for batch in batches),
        }
    goals = dict[str, Goal]()
    for size in found:
        if size.workers > 1 and size.rounds == Size(1).rounds:
            share = rates[size] / size.workers / rates[Size(1)]
            goals[f"{size.workers} workers, rollouts a second of {size.workers} times one's"] = at_least(share, 0.9)
        for name, half in (
            ("twice the workers", Size(size.workers // 2, size.rounds)),
            ("the same workers", Size(size.workers, size.rounds // 2)),
        ):
            if half in found:
                more = 2 * costs[size].paid / costs[half].paid
                goals[f"twice the rollouts on {name}, {size.workers}: CPU"] = at_most(more, 2.1)
    goals["CPU ms of the driver a rollout"] = at_most(max(cost.driver for cost in costs.values()), 2.0)
    return figures, goals


def of_all_at_once(batch: Batch) -> tuple[dict[str, float], dict[str, Goal]]:
    """Return the results and the goals of the batch whose rollouts all run at once."""
    driver = batch.costs.driver
    figures = {
        "at_once": float(batch.rollouts),
        "at_once_rollouts_per_s": batch.rate,
        "at_once_driver_collect_ms": batch.costs.collect,
        "at_once_driver_step_ms": batch.costs.step,
        "at_once_workers_ms": batch.costs.workers,
        "at_once_driver_pause_s": batch.pause_s,
        "object_store_bytes_a_rollout": batch.bytes,
        "object_store_bytes_of_its_samples": batch.sample_bytes,
        "driver_is_full_at_rollouts_per_s": 1e3 / driver,
        "seconds_of_a_rollout_that_fill_the_driver": batch.rollouts * driver / 1e3,
    }
    return figures, {"CPU ms of the driver a rollout, all at once": at_most(driver, 2.0)}


def of_simulation(played_s: Sequence[float], costs: Costs, at_once: int, seed: int) -> dict[str, float]:
    """Return the rollouts per second of many workers and the driver's load, for longer and longer rollouts."""
    figures = dict[str, float]()
    for longer in LONGER:
        found = simulated(played_s, costs, at_once=at_once, longer=longer, seed=seed)
        figures |= {
            f"simulated_seconds_a_rollout_x{longer}": fmean(played_s) * longer,
            f"simulated_rollouts_per_s_x{longer}": found.rate,
            f"simulated_driver_busy_x{longer}": found.busy,
        }
    return figures


def arguments() -> argparse.Namespace:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--workloads", type=Path, default=None, metavar="FILE.py", help="use turn_seconds of this file")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help="rollouts that run at once")
    parser.add_argument("--quick", action="store_true", help="run only 1 and 2 workers, with one batch each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def measured(args: argparse.Namespace, waits: Sequence[float]) -> tuple[dict[Size, list[Batch]], Batch]:
    """Return the batches of each size, and the batch whose rollouts all run at once."""
    sizes, turns = (SIZES[:2], 1) if args.quick else (SIZES, TURNS)
    found = await by_size(waits, args.seed, sizes=sizes, turns=turns)
    return found, await all_at_once(waits, args.seed, count=args.at_once, workers=max(sizes).workers)


def main() -> None:
    args = arguments()
    given = load_workloads(args.workloads).turn_seconds(args.seed) if args.workloads else None
    waits = asyncio.run(turn_seconds(args.seed)) if given is None else list(given)
    with local_ray(cpus=4):
        found, whole = asyncio.run(measured(args, waits))
    figures, goals = of_sizes(found)
    more, goal = of_all_at_once(whole)
    alone = max(found[Size(1)], key=lambda batch: batch.rate).played_s
    figures |= more | of_simulation(alone, whole.costs, whole.rollouts, args.seed)
    reference: dict[str, float | str] = {
        "mean seconds of a tool call": fmean(waits),
        "mean seconds of a rollout": fmean(alone),
        "rollouts a second of one worker that only waits": SLOTS / fmean(alone),
    }
    report("scale", figures=figures, reference=reference, goals=goals | goal, as_json=args.json)


if __name__ == "__main__":
    main()
