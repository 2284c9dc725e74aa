"""Rollouts on a Ray cluster of this machine, run and trained on as in a run, and what they cost."""

import asyncio
import logging
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleBuffer, dumps
from typing import Any, NamedTuple, cast

import agentgym as ag
from agentgym.engines.token_bytes import bytes_by_model
from agentgym.run.metrics_logger import MetricsLogger
from agentgym.run.recorder import Recorder, open_recorder
from agentgym.samples import build_samples
from agentgym.scheduling import Schedule
from agentgym.scheduling.accounting import Groups
from agentgym.types.completion import Sampling
from benchmarks.engine import load
from benchmarks.scale.sleeping import Scorer, Waits

SLOTS = 32
"""Rollouts that a worker runs at once when numbers of workers are compared."""
GROUP = 8
TURNS = 3
"""Batches of each size."""


class Size(NamedTuple):
    """A number of workers, and how many rollouts of a batch each of their slots runs."""

    workers: int
    rounds: int = 3

    @property
    def prompts(self) -> int:
        return self.workers * SLOTS * self.rounds // GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU milliseconds per rollout: of the driver before and after it has the batch, of the workers, and of Ray."""

    collect: float
    step: float
    workers: float
    ray: float

    @property
    def driver(self) -> float:
        return self.collect + self.step

    @property
    def paid(self) -> float:
        """The cost of driver and workers."""
        return self.driver + self.workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The measurements of one batch."""

    rollouts: int
    seconds: float
    """Seconds from the request for the batch until the driver has it."""
    costs: Costs
    bytes: float
    """Bytes of a rollout in the object store when a worker returns it."""
    sample_bytes: float
    """Bytes of a rollout's samples in the object store when they are sent to the training processes."""
    pause_s: float
    """Longest time for which the driver's event loop was blocked."""
    played_s: Sequence[float]
    """Seconds of each rollout."""

    @property
    def rate(self) -> float:
        return self.rollouts / self.seconds


async def turn_seconds(seed: int, *, count: int = 64, at_once: int = 8) -> list[float]:
    """Return the seconds of turns of the embedded engine, with a median of 230 tokens and some much longer.

    They are CPU seconds of this process, which does nothing else meanwhile: the time of a turn on a free core.
    """
    drawn = random.Random(seed)
    lengths = [min(1000, int(230 * drawn.lognormvariate(0, 0.4))) for _ in range(count)]
    places = asyncio.Semaphore(at_once)
    config = ag.TransformersConfig(slots=at_once, context_tokens=1024)
    # The turns use ids only, so the tokenizer is not needed.
    async with ag.TransformersEngine(load(), config, tokenizer=cast("Any", object())) as engine:

        async def turn(number: int) -> float:
            async with places:
                began, session = time.process_time(), str(number)
                await engine.generate(
                    [number + 1] * 16, session=session, max_tokens=lengths[number], sampling=Sampling(), seed=number
                )
                await engine.release(session)
                return time.process_time() - began

        return list(await asyncio.gather(*(turn(number) for number in range(count))))


class Meter:
    """CPU seconds since the last reading, of three groups of processes.

    They are this process, the rollout workers below it, and all other processes below it except the training
    processes.
    """

    def __init__(self) -> None:
        self.read = self._now()

    def lap(self) -> dict[str, float]:
        """Return the seconds of each since the last call."""
        now, before = self._now(), self.read
        self.read = now
        return {name: now[name] - before[name] for name in now}

    def _now(self) -> dict[str, float]:
        seconds = {"driver": time.process_time(), "workers": 0.0, "ray": 0.0}
        tick = os.sysconf("SC_CLK_TCK")
        for process in descendants(os.getpid()):
            try:
                title = (process / "cmdline").read_bytes()
                words = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            kind = "workers" if title.startswith(b"ray::RolloutWorker") else "ray"
            if not title.startswith(b"ray::Scorer"):  # training processes are not measured here
                seconds[kind] += (int(words[11]) + int(words[12])) / tick
        return seconds


def descendants(process: int) -> Iterator[Path]:
    """Yield the /proc folders of all processes below `process` (Linux)."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    waiting = [process]
    while waiting:
        above = waiting.pop()
        below = [one for one, parent in parents.items() if parent == above]
        waiting += below
        yield from (Path("/proc") / str(one) for one in below)


async def watch(pauses: list[float], every_s: float = 0.1) -> None:
    """Record how much later than requested this task was woken."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(every_s)
        pauses.append(time.perf_counter() - asked - every_s)


def packed_bytes(what: object) -> int:
    """Return the bytes of an object as Ray packs it: a pickle stream and its out-of-band arrays."""
    beside: list[PickleBuffer] = []
    stream = dumps(what, protocol=5, buffer_callback=beside.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in beside)


@dataclass(slots=True, eq=False)
class Driver:
    """Does with each batch what a run's driver does."""

    scheduler: Any
    trainer: Any
    record: Recorder
    steps: int = 0

    async def batch(self) -> Batch:
        """Run one batch and train on it."""
        meter, pauses = Meter(), [0.0]
        watching = asyncio.create_task(watch(pauses))
        began = time.perf_counter()
        groups = await self.scheduler.collect()
        seconds, collected = time.perf_counter() - began, meter.lap()
        await self._learn(groups)
        learned = meter.lap()
        watching.cancel()
        rollouts, ms = groups.rollouts, 1e3 / len(groups.rollouts)
        if failed := [rollout.error for rollout in rollouts if rollout.error is not None]:
            raise RuntimeError(f"{len(failed)} rollouts failed: {failed[0]}")
        costs = Costs(
            collect=collected["driver"] * ms,
            step=learned["driver"] * ms,
            workers=(collected["workers"] + learned["workers"]) * ms,
            ray=(collected["ray"] + learned["ray"]) * ms,
        )
        return Batch(
            rollouts=len(rollouts),
            seconds=seconds,
            costs=costs,
            bytes=packed_bytes(groups.groups) / len(rollouts),
            sample_bytes=packed_bytes(build_samples(groups)) / len(rollouts),
            pause_s=max(pauses),
            played_s=[rollout.metrics["seconds"] for rollout in rollouts],
        )

    async def _learn(self, groups: Groups) -> None:
        step, self.steps = self.steps, self.steps + 1
        await asyncio.to_thread(self.record.collected, groups, step=step)
        samples = await asyncio.to_thread(build_samples, groups)
        stats, scored = await self.trainer.step_and_logprobs(samples)
        self.record.trained(groups, samples, scored, step=step)
        await asyncio.to_thread(self.record.step, step, groups, samples, scored, stats)
        await self.scheduler.sampler_states()
        await asyncio.to_thread(self.record.flush)


@asynccontextmanager
async def opened(workers: int, slots: int, prompts: int, waits: Sequence[float], seed: int) -> AsyncIterator[Driver]:
    """Open a driver with this number of workers, each of which runs `slots` rollouts at once."""
    import ray

    from agentgym.cluster.on_ray import Cluster
    from agentgym.cluster.trainer import ClusterTrainer

    run = ag.RunConfig(
        recipe="scale",
        env="benchmarks.scale.sleeping:Waits",
        env_args={"waits_s": ",".join(f"{seconds:.4f}" for seconds in waits)},
        model="tiny",
        engine=ag.CustomEngineConfig(name="benchmarks.scale.sleeping:Ready", slots=slots),
        prompts_per_step=prompts,
        group_size=GROUP,
        cluster=ag.ClusterConfig(workers=workers, worker_cpus=0.01),
        ray="local",
        seed=seed,
    )
    scorer = ray.remote(Scorer).options(num_cpus=0).remote()
    trainer = ClusterTrainer([scorer], run.model, run.train, seed=seed)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The fallback model needs no opening, and the collector's trainer is not used.
        opening = Cluster(run).collector(Waits, cast("Any", trainer), lambda said: None, None, None)
        collector = await stack.enter_async_context(opening)
        log = MetricsLogger(folder, steps=TURNS)
        record = await stack.enter_async_context(open_recorder(folder, log, first=True, done=0))
        record.name_tokens(bytes_by_model(collector.engine, {}))
        few = Waits.tasks("test")[: 2 * workers]
        await collector.collect(few, Schedule(group_size=2, seed=seed))  # imports, first connections
        yield Driver(
            await stack.enter_async_context(
                collector.schedule(Schedule(prompts_per_step=prompts, group_size=GROUP, seed=seed))
            ),
            trainer,
            record,
        )


async def by_size(waits: Sequence[float], seed: int, *, sizes: Sequence[Size], turns: int) -> dict[Size, list[Batch]]:
    """Return the batches of each size; the sizes take turns."""
    found: dict[Size, list[Batch]] = {size: [] for size in sizes}
    async with AsyncExitStack() as stack:
        drivers = {
            size: await stack.enter_async_context(opened(size.workers, SLOTS, size.prompts, waits, seed))
            for size in sizes
        }
        for _ in range(turns):
            for size, driver in drivers.items():
                found[size].append(await driver.batch())
    return found


async def all_at_once(waits: Sequence[float], seed: int, *, count: int, workers: int) -> Batch:
    """Return one batch whose rollouts all run at once."""
    groups = count // GROUP
    async with opened(workers, -(-groups // workers) * GROUP, groups, waits, seed) as driver:
        return await driver.batch()


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Start a Ray cluster for this process only, in its own folder, so that no other process finds it."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default, Ray gives workers a niceness of 15, but not the driver: they would wait for all other work of the
    # machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # The sockets are in this folder, and their paths must not be long.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            "local",
            num_cpus=cpus,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
