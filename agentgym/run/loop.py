"""Collect, credit, train, sync: the only file that knows both wings.

A run is `train_policy(run)`; its parts are functions of their own, for a loop you write yourself::

    play = Play(env, engine, trainer, boxes, sampling)
    async with play.schedule(8, n=8, seed=seed) as rollouts:
        for step in range(steps):
            groups = await rollouts.collect()
            stats = await trainer.step(build_samples(groups, advantage="dr_grpo"))
            await sync_weights(trainer, engine, step + 1, probe, sampling, tolerance=1e-3)
"""

import asyncio
import json
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentgym.engines.base import Engine
from agentgym.engines.sglang.engine import SGLangEngine
from agentgym.engines.transformers.engine import LocalConfig, LocalEngine
from agentgym.environments.registry import find_env
from agentgym.errors import EngineError
from agentgym.extras import needs_extra
from agentgym.models import find_model
from agentgym.run.config import RunConfig
from agentgym.run.distributed_rollouts import Collector
from agentgym.run.log import MetricsLogger, Sink, strict
from agentgym.run.preflight import refuse_early
from agentgym.run.report import Report
from agentgym.run.resume import CheckpointManager, load_run_state
from agentgym.samples import build_samples
from agentgym.sandboxes.choose import AnyBox
from agentgym.types import Sampling

if TYPE_CHECKING:  # torch is loaded when a run begins: a command line asks for help, or is stopped, before
    from agentgym.train.trainer import Trainer

SUMMARY = "summary.json"
"""In the run's folder: what `train_policy` returns."""
PROBE = 256
"""Ids that trainer and engine both score after each sync, at most: a server may draw once behind each of them."""


async def sync_weights(
    trainer: "Trainer", engine: Engine, version: int, probe: Sequence[int], sampling: Sampling, tolerance: float
) -> float:
    """Give the engine the trainer's adapter, and prove on the `probe` ids that it took it; the difference in nats."""
    await engine.load_adapter(trainer.adapter(), version=version)
    gap = float(np.abs(trainer.score(probe, sampling=sampling) - await engine.score(probe, sampling=sampling)).max())
    if not gap <= tolerance:  # also where it is nan
        raise EngineError(
            f"sync: after loading version {version} the engine's log-probabilities are up to {gap:.2g} nats off the "
            f"trainer's (tolerance {tolerance:g}): the engine does not sample from the policy that is trained"
        )
    return gap


async def train_policy(run: RunConfig, *, sinks: Sequence[Sink] = ()) -> dict[str, Any]:
    """Train an adapter on an env; the summary, which is also the run's summary.json.

    In the run's folder there are settings.json from the start, metrics.jsonl as it goes, a checkpoint every
    `save_every` steps and at the end, and at the end the adapter, in PEFT's format, in `adapter/`. When it is cancelled
    or fails, at any moment, it leaves the checkpoint and the adapter of the last finished step. Each of `sinks` is
    called with the figures of a step on the first process.
    """
    try:
        return await _learn(run, sinks)
    except asyncio.CancelledError as stopped:  # what it interrupted is of no use to whoever stopped it
        raise stopped.with_traceback(None) from None


async def _learn(run: RunConfig, sinks: Sequence[Sink]) -> dict[str, Any]:
    start = time.perf_counter()
    env = find_env(run.env)
    folder = run.resume or run.out or new_folder(run.recipe)
    refuse_early(run, env, folder)
    with needs_extra():
        from transformers.utils.logging import disable_progress_bar

        from agentgym.train.trainer import Trainer

    disable_progress_bar()  # the log has its own
    report = Report()
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(Trainer(run.model, run.train, seed=run.seed))
        progress = load_run_state(trainer, folder, resume=run.resume is not None)
        shown = trainer.rank == 0
        log = stack.enter_context(MetricsLogger(folder, steps=run.steps, shown=shown, done=progress.step, sinks=sinks))
        log.note("loading")
        engine = await stack.enter_async_context(open_engine(run, log.note))
        slots = run.engine.slots
        sandbox = AnyBox(kind=run.box) if env.sandbox and run.box != "auto" else env.sandbox
        boxes = await stack.enter_async_context(sandbox.open(slots)) if sandbox else None
        collector = Collector(env, engine, trainer, boxes, run.sampling, concurrency=slots)
        if progress.step:
            await sync_weights(trainer, engine, progress.step, progress.probe, run.sampling, run.probe_tolerance)
        else:
            progress = replace(progress, eval_before=await _evaluate(run, collector, log, 0))
        async with CheckpointManager(
            trainer, log, progress, steps=run.steps, every=run.save_every, keep=run.keep
        ) as saver:
            await _train(run, collector, log, saver, report)
        after = await _evaluate(run, collector, log, run.steps)
    summary = {
        "recipe": run.recipe,
        **log.summary(),
        **report.summary(log.rows),
        "eval_before": progress.eval_before,
        "eval_after": after,
        "seed": run.seed,
        "box": run.box,
        "cpu_seconds": round(_cpu_seconds(), 1),
        "seconds": round(time.perf_counter() - start, 1),
        "out": str(folder),
    }
    for said in report.warnings(log.rows):
        log.alert(said)
    if shown:
        (folder / SUMMARY).write_text(json.dumps(strict(summary), allow_nan=False, indent=2) + "\n")
    return summary


def open_engine(run: RunConfig, progress: Callable[[str], None]) -> AbstractAsyncContextManager[Engine]:
    """The engine that the run asks for, to be opened by `async with`; a server that starts tells `progress`."""
    if isinstance(run.engine, LocalConfig):
        return LocalEngine(run.model, run.engine)
    rank = max(run.engine.max_lora_rank, run.train.lora_rank)
    config = replace(run.engine, max_lora_rank=rank)
    return SGLangEngine(find_model(run.model), config, progress=lambda said: progress(f"server: {said[:40]}"))


async def _train(
    run: RunConfig, collector: Collector, log: MetricsLogger, saver: CheckpointManager, report: Report
) -> None:
    begun = saver.progress
    probe = begun.probe
    async with collector.schedule(
        run.prompts,
        n=run.group_size,
        oversample=run.oversample,
        staleness=run.staleness,
        seed=run.seed,
        sampler_states=begun.sampler_states,
        by_turn=run.advantage_level == "turn",
    ) as rollouts:
        for step in range(begun.step, run.steps):
            log.note("rollouts")
            groups = await rollouts.collect(to_come=run.steps - step - 1)
            report.add(groups)
            batch = build_samples(groups, advantage=run.advantage, merge=run.merge, advantage_level=run.advantage_level)
            log.note("training")
            stats = await collector.trainer.step(batch)
            probe = probe or next(s.token_ids[:PROBE].tolist() for r in groups.rollouts for s in r.segments)
            gap = await sync_weights(
                collector.trainer, collector.engine, step + 1, probe, run.sampling, run.probe_tolerance
            )
            log(step, groups.metrics() | batch.metrics() | stats | {"sync/logprob_gap": gap})
            await saver.done(replace(begun, step=step + 1, probe=probe, sampler_states=rollouts.sampler_states()))


async def _evaluate(run: RunConfig, collector: Collector, log: MetricsLogger, done: int) -> float | None:
    """The held-out score after `done` steps, in the log; None where the run asks for none."""
    if not run.eval_tasks:
        return None
    log.note("held-out evaluation")
    reward = round(await collector.evaluate(run.eval_tasks), 4)
    log.held_out(done, reward)
    return reward


def new_folder(recipe: str) -> Path:
    """Of a run that names none."""
    return Path("runs") / recipe / datetime.now().strftime("%Y%m%d-%H%M%S")


def _cpu_seconds() -> float:
    """Of this process and the children it has reaped, boxes included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
