"""Rollout workers on Ray: rollouts a second with 1, 2 and 4 of them, and what the driver pays for each rollout.

Episodes wait for the engine most of the time, as rollouts against a server do: each turn takes as long as one of
`LATENCIES_S`, drawn by its seed. The workers are real Ray actors on this machine, and the driver collects, joins and
unpacks their groups as a run does; nothing is trained. With `ALIVE` rollouts at once the driver's CPU a rollout says
where it saturates: at as many rollouts a second as fit into one second of one core.

`python -m benchmarks.scale [--json] [--workloads FILE.py] [--seed N]` needs `pip install 'agentgym[ray]'`. A file of
workloads has `latencies_s(seed)`, the seconds of turns to draw from.
"""

import asyncio
import logging
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import ray

import agentgym as ag
from agentgym.adapter import Adapter
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.cluster.on_ray import Cluster
from agentgym.run.peers import Share
from agentgym.types import Completion, Floats, Sampling, StepResult, Version
from benchmarks.harness import arguments, at_least, at_most, load_workloads, report

LATENCIES_S = (0.18, 0.22, 0.27, 0.31, 0.36, 0.42, 0.5, 0.63, 0.85, 1.4)
"""Deciles of the seconds that a turn took at a real SGLang server on this kind of machine, 16 requests at once."""
TURNS = 4
AT_ONCE = 64
"""Rollouts that one worker plays at once, where the number of workers is measured."""
ALIVE = 10_000
"""Rollouts at once, over `SPREAD` workers, where the driver is measured."""
SPREAD = 4
GROUP = 8
ANSWER = np.arange(20, 60)
"""The ids of each turn: 40 of them."""


class Waits(ag.Env[ag.Task]):
    """Says one word back until `TURNS` turns are played."""

    limits = ag.Limits(turns=TURNS, seconds=600)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(lambda i: ag.Task(id=str(i), prompt="Go on."), range(1_000_000))

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[ag.Message], dict[str, Any]]:
        self.played = 0
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action: ag.Message) -> StepResult:
        self.played += 1
        more: list[ag.Message] = [{"role": "user", "content": "More."}]
        return StepResult(more, 0.0, self.played == TURNS, False, {})

    async def score(self) -> dict[str, float]:
        return {"even": float(int(self.task.id) % 2)}


class Late:
    """An engine whose every turn takes as long as one of the latencies."""

    context_tokens = 1 << 16
    model_name = "tiny"
    dtype = "float32"

    def __init__(self, model: Any) -> None:
        self.tokenizer = chat_tokenizer("tiny")
        self.version = 0

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        await asyncio.sleep(LATENCIES_S[seed % len(LATENCIES_S)])
        logprobs = np.full(len(ANSWER), -0.5, np.float32)
        return Completion(token_ids=ANSWER, logprobs=logprobs, finish_reason="stop", versions=(Version(0, 0),))

    async def release(self, session: str) -> None:
        """Nothing is kept of a session."""

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        self.version = version

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        return np.zeros(max(len(token_ids) - 1, 0), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one batch of rollouts took."""

    rollouts: int
    seconds: float
    driver_ms: float
    """CPU milliseconds of the driver, all its threads, for each rollout."""
    pause_ms: float
    """The longest time that the driver's event loop was kept from its next event."""

    @property
    def rate(self) -> float:
        """Rollouts a second."""
        return self.rollouts / self.seconds


@asynccontextmanager
async def opened(workers: int, slots: int, prompts: int) -> AsyncIterator[Any]:
    """Open a scheduler over so many workers, each of which plays `slots` rollouts at once."""
    run = ag.RunConfig(
        recipe="scale",
        env="benchmarks.scale:Waits",
        model="tiny",
        engine=ag.OtherEngine(name="benchmarks.scale:Late", slots=slots),
        prompts=prompts,
        group_size=GROUP,
        cluster=ag.ClusterConfig(workers=workers, worker_cpus=0.01),
        ray="auto",
    )
    cluster = Cluster(run)
    async with (
        cluster.collector(Waits, cast("Any", Share()), lambda said: None, None, None) as collector,
        collector.schedule(prompts, n=GROUP, seed=0) as scheduler,
    ):
        await scheduler.collect()  # imports, first connections
        yield scheduler


async def measured(scheduler: Any) -> Measured:
    """Collect one batch."""
    loop = asyncio.get_running_loop()
    pauses, ended = [0.0], asyncio.Event()

    async def watch() -> None:
        while not ended.is_set():
            asked = loop.time()
            await asyncio.sleep(0.005)
            pauses.append(loop.time() - asked - 0.005)

    watching = asyncio.create_task(watch())
    began, cpu = time.perf_counter(), time.process_time()
    groups = await scheduler.collect()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    ended.set()
    await watching
    count = len(groups.rollouts)
    return Measured(rollouts=count, seconds=took, driver_ms=1000 * cpu / count, pause_ms=1000 * max(pauses))


async def rates(workers: int) -> Measured:
    """Two rounds of full slots on so many workers; the better of two batches."""
    async with opened(workers, AT_ONCE, workers * AT_ONCE * 4 // GROUP) as scheduler:
        return max([await measured(scheduler) for _ in range(2)], key=lambda found: found.rate)


async def doubled() -> tuple[Measured, Measured]:
    """A batch of 1,024 rollouts and one of 2,048, by two workers; the cheaper of three each."""
    found = []
    for prompts in (128, 256):
        async with opened(2, AT_ONCE, prompts) as scheduler:
            found.append(min([await measured(scheduler) for _ in range(3)], key=lambda each: each.driver_ms))
    return found[0], found[1]


async def alive() -> Measured:
    """One batch of `ALIVE` rollouts, all at once."""
    async with opened(SPREAD, ALIVE // SPREAD, ALIVE // GROUP) as scheduler:
        return await measured(scheduler)


def main() -> None:
    asked = arguments(__doc__ or "")
    if asked.workloads is not None:
        global LATENCIES_S
        LATENCIES_S = tuple(load_workloads(asked.workloads).latencies_s(asked.seed))
    ray.init("local", num_cpus=SPREAD + 1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        by_workers = {workers: asyncio.run(rates(workers)) for workers in (1, 2, 4)}
        half, whole = asyncio.run(doubled())
        all_alive = asyncio.run(alive())
    finally:
        ray.shutdown()
    figures = {f"rollouts_per_s_{workers}": found.rate for workers, found in by_workers.items()}
    figures |= {
        "driver_ms_per_rollout": whole.driver_ms,
        "alive": float(all_alive.rollouts),
        "alive_driver_ms_per_rollout": all_alive.driver_ms,
        "alive_longest_pause_ms": all_alive.pause_ms,
        "alive_rollouts_per_s": all_alive.rate,
        "driver_saturates_at_rollouts_per_s": 1000 / all_alive.driver_ms,
    }
    one = by_workers[1].rate
    goals = {
        "efficiency_2": at_least(by_workers[2].rate / (2 * one), 0.9),
        "efficiency_4": at_least(by_workers[4].rate / (4 * one), 0.9),
        "twice_the_rollouts_cost": at_most(whole.driver_ms * whole.rollouts / (half.driver_ms * half.rollouts), 2.1),
        "driver_ms_per_rollout": at_most(whole.driver_ms, 2.0),
    }
    mean = statistics.fmean(LATENCIES_S) * TURNS
    bound = {"waiting_alone_rollouts_per_s_of_one": AT_ONCE / mean, "mean_episode_s": mean}
    report("scale", figures=figures, reference=bound, goals=goals, as_json=asked.json)


if __name__ == "__main__":
    main()
