"""A simulation of many rollout workers: batches with the measured costs."""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale.measure import Costs

A_WORKER = 64
"""Rollouts that a simulated worker runs at once: the default of a run."""
BATCHES = 20
"""Batches of a simulated run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The result of a simulated run."""

    rate: float
    """Rollouts per second."""
    busy: float
    """The share of the time in which the driver computes."""


def simulated(
    played_s: Sequence[float],
    costs: Costs,
    *,
    at_once: int,
    slots: int = A_WORKER,
    rounds: int = 1,
    ahead: bool = True,
    longer: float = 1.0,
    seed: int = 0,
) -> Simulated:
    """Simulate batches of `rounds` rollouts per slot, with durations drawn from `played_s`, and their joining.

    With `ahead`, a worker continues when its share is done, at most one batch ahead of the driver. Without `ahead`, it
    continues when the driver is done with the batch.
    """
    drawn, workers = random.Random(seed), max(1, round(at_once / slots))
    collect_s, step_s = costs.collect * slots * rounds / 1e3, costs.step * slots * rounds * workers / 1e3
    free, worked, ready = 0.0, 0.0, [0.0] * workers
    for _ in range(BATCHES):
        arrived = [at + makespan(drawn.choices(played_s, k=slots * rounds), slots) * longer for at in ready]
        last = free  # when the driver is done with the previous batch
        for at in sorted(arrived):
            free = max(free, at) + collect_s
        free += step_s
        worked += collect_s * workers + step_s
        ready = [max(at, last) for at in arrived] if ahead else [free] * workers
    return Simulated(rate=BATCHES * workers * slots * rounds / free, busy=worked / free)


def makespan(seconds: Sequence[float], places: int) -> float:
    """Return the seconds until all durations have passed, if each next one gets the slot that becomes free first."""
    free = [0.0] * places
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)
