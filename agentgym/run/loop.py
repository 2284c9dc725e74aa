"""The training loop: collect, assign credit, train, sync, log.

`ag.train_policy(run)` is a complete run. Its parts are public, for a loop of your own::

    collector = Collector(env, engine, trainer, sandboxes, sampling)
    sync = WeightSync(trainer, engine, probe, sampling)
    await sync.begin()
    async with collector.schedule(Schedule(prompts_per_step=8, group_size=8, seed=seed)) as scheduler:
        for step in range(steps):
            groups = await scheduler.collect()
            stats = await trainer.step(build_samples(groups, advantage_estimator="dr_grpo"))
            await sync(step + 1)
"""

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.engines.adapter_files import chat_files
from agentgym.engines.base import Engine, weights_engine
from agentgym.environments.env import Env
from agentgym.errors import AgentGymError
from agentgym.files import names
from agentgym.files.folder_lock import LockedFolder
from agentgym.hub import of_field
from agentgym.judges.model_roles import unasked
from agentgym.machine.resources import peak_memory
from agentgym.rollouts.rollout_warnings import check_env_tools
from agentgym.run.callbacks import Callback, Callbacks
from agentgym.run.collector import Collector
from agentgym.run.colocation import lent_memory
from agentgym.run.config import RunConfig
from agentgym.run.evaluation import Evaluations
from agentgym.run.follow_model import found_values
from agentgym.run.lost import PREFIX, Losses
from agentgym.run.metrics.clock import StepClock
from agentgym.run.metrics.environment import FILE as SURROUNDINGS, write_surroundings
from agentgym.run.metrics.watch import Watch
from agentgym.run.metrics_logger import MetricsLogger
from agentgym.run.open_collector import engine_counts, own_template
from agentgym.run.parts import Parts
from agentgym.run.preflight import check_data_types, warn_of_engine_limits
from agentgym.run.recorder import Recorder, open_recorder
from agentgym.run.resume import CheckpointManager, load_run_state
from agentgym.run.start_report import Speed, measure_speed, start_report
from agentgym.run.summary import look_at_failed
from agentgym.run.tasks.envs import env_metrics, members_of
from agentgym.run.teacher import open_teacher, taught_samples
from agentgym.run.trackers import open_tracker
from agentgym.samples import SampleBatch, build_samples, value_samples
from agentgym.scheduling.accounting import Groups, raise_if_all_failed
from agentgym.scheduling.schedule import Schedule
from agentgym.store.run_settings import flat
from agentgym.store.schema import FILE as STORE
from agentgym.types.rollout import Rollout
from agentgym.weight_sync.sync import WeightSync

if TYPE_CHECKING:  # torch is loaded when a run starts, so that --help and an early Ctrl-C stay fast
    from agentgym.train.trainer import Trainer

PROBE = 256
"""Maximum number of ids that trainer and engine both score after a sync.

It is small because a server may have to sample a token after each id to score it.
"""


async def run_loop(
    run: RunConfig,
    losses: Losses,
    opened_parts: Callable[[RunConfig, Losses], AbstractAsyncContextManager[Parts]],
    env: type[Env[Any]],
    held: LockedFolder | None,
    callbacks: Sequence[Callback],
    engine: Engine | None,
) -> dict[str, Any]:
    """Run the loop from the state in the run's folder to its last step, and return the summary.

    `opened_parts` opens the run's trainer and collectors, which count what they lose in `losses`. `held` is the run's
    locked folder, or None on every process except the first. `engine` is used instead of the run's engine if it isn't
    None.
    """
    start = time.perf_counter()
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(opened_parts(run, losses))
        trainer = await stack.enter_async_context(parts.trainer())
        run = replace(run, max_steps=await asyncio.to_thread(trainer.first, lambda: run.max_steps))  # as rank 0 read it
        folder = await asyncio.to_thread(trainer.first, lambda: None if held is None else held.path)  # on all ranks
        assert folder is not None
        state = await asyncio.to_thread(load_run_state, trainer, folder, resume=run.resume is not None)
        first = trainer.rank == 0
        share = run.prompts_per_step * run.group_size // trainer.world
        log = MetricsLogger(folder, steps=run.max_steps, shown=first, done=state.step, rollouts=share)
        recording = open_recorder(folder, log, first=first, done=state.step, solved=run.solved, held=held)
        record = await stack.enter_async_context(recording)
        losses.begin(log.rows[-1] if log.rows else {})
        told = await stack.enter_async_context(open_callbacks(run, record, callbacks, first=first))
        if first:
            write = partial(write_surroundings, folder)
            await asyncio.to_thread(log.disk.attempt, SURROUNDINGS, write, then="the run continues without it")
            await asyncio.to_thread(record.follow)
        log.note("loading")
        tokenizer = await asyncio.to_thread(own_template, run)
        collector = await stack.enter_async_context(parts.collector(env, trainer, log.note, tokenizer, engine))
        await asyncio.to_thread(record.follow_model, found_values(run, trainer, collector.engine))
        check_data_types(trainer.dtype, getattr(collector.engine, "dtype", ""))
        if run.train.method == "full":
            weights_engine(collector.engine)
        check_env_tools(env, collector.engine)
        for each in members_of(env) if first else ():
            warn_of_engine_limits(each, collector.engine)
        record.name_tokens(collector.token_bytes())
        with of_field(model="teacher", engine="teacher_engine"):
            teacher = await stack.enter_async_context(open_teacher(run, trainer, log.note))
        await say_start(run, trainer, collector, teacher, record, new=not state.step)
        clock = StepClock()
        beside = await stack.enter_async_context(parts.evaluator(env, log.note))
        evaluations = Evaluations(run, trainer, collector, record, told, clock, beside=beside)
        await stack.enter_async_context(evaluations)
        steps = _Steps(run, parts, trainer, collector, record, told, teacher, evaluations, clock)
        if first:
            await asyncio.to_thread(evaluations.say_missing, state.step)
        if state.step:
            steps.sync = steps.new_sync(state.probe, state.probe_base)
            await steps.sync(state.step)
        else:
            state = replace(state, eval_before=await evaluations.now("eval_before", 0))
        async with CheckpointManager(trainer, record, state, run, chat_files(collector.engine)) as checkpoints:
            await steps.train(checkpoints)
            await evaluations.end()
            after = await evaluations.now("eval_after", run.max_steps, checkpoints)
        summary = {
            "recipe": run.name,
            **record.summary(),
            "eval_before": state.eval_before,
            "eval_after": after,
            "best_step": best.step if (best := checkpoints.best) else None,
            "best_reward": best.reward if best else None,
            "callback_errors": dict(told.errors),
            **({"lost": lost} if (lost := parts.lost()) else {}),
            "seed": run.seed,
            "eval_seed": run.held_out_seed,
            "sandbox": run.sandbox,
            "output_dir": str(log.folder),
            "store": str(log.folder / STORE),
        }
        await told.call("on_run_end", summary)
    folder = await asyncio.to_thread(record.last_place)
    summary |= {
        **record.summary(),  # complete, since the recorder is closed
        "output_dir": str(folder),
        "store": str(folder / STORE),
        "callback_errors": dict(told.errors),
        "cpu_seconds": round(_cpu_seconds(), 1),
        "peak_memory_gib": round(peak_memory() / 2**30, 2),
        "seconds": round(time.perf_counter() - start, 1),
    }
    await asyncio.to_thread(record.finish, summary)
    return summary


async def say_start(
    run: RunConfig, trainer: "Trainer", collector: Collector, teacher: Engine | None, record: Recorder, *, new: bool
) -> None:
    """Print and store what the run is about to do. `new` is whether the run has taken no step yet.

    All processes must call it.
    """
    engine, envs = collector.engine, members_of(collector.env)
    others = [*collector.models.values(), *([] if teacher is None else [teacher])]
    speed = await measure_speed(trainer, engine) if new else Speed()
    report = await asyncio.to_thread(start_report, run, trainer, engine, envs, speed, others)
    for line in report.lines:
        record.log.say(line)
    for said in report.warnings:
        record.log.alert(said)
    await asyncio.to_thread(record.started, report.facts)


@dataclass(slots=True)
class _Steps:
    """Runs the training steps of one run; its fields are the run's opened parts."""

    run: RunConfig
    parts: Parts
    trainer: "Trainer"
    collector: Collector
    record: Recorder
    callbacks: Callbacks
    teacher: Engine | None
    """The engine that scores the policy's tokens; None if advantages come from rewards."""
    evaluations: Evaluations
    clock: StepClock
    sync: WeightSync | None = None
    """Sends each policy to the engine; None before the first sync, while the engine has the base model."""

    async def train(self, checkpoints: CheckpointManager) -> None:
        """Run the remaining steps, starting from the run's current state."""
        run, begun, trainer, log = self.run, checkpoints.state, self.trainer, self.record.log
        env = self.collector.env
        part = self.clock.part
        schedule = self.collector.schedule(schedule_of(run), begun.sampler_states, on_rollout=self.rollout_ended)
        async with schedule as scheduler:
            for step in range(begun.step, run.max_steps):
                await self.evaluations.settle()
                if run.eval_every and step and step % run.eval_every == 0:
                    await self.evaluations.begin(step, checkpoints)
                log.note("rollouts")
                with part("collect"):
                    groups = await scheduler.collect(to_come=run.max_steps - step - 1, must_score=False)
                await asyncio.to_thread(self.record.collected, groups, step=step)
                for said in unasked(run.models, groups.rollouts, members_of(env)) if step == begun.step else ():
                    log.alert(f"{run.name}: {said}")
                raise_if_all_failed(groups, then=look_at_failed(log.folder))
                batch, taught = await self.credit(groups)
                sync = self.sync = self.sync or self.new_sync(_probe(groups))
                with part("sync"):
                    await sync.begin()
                log.note("training")
                with part("train"):
                    async with lent_memory(run, self.collector):
                        stats, logprobs = await trainer.step_and_logprobs(batch)
                self.record.trained(groups, batch, logprobs, step=step)
                with part("sync"):
                    synced = await sync(step + 1)
                speed = self.clock.metrics(
                    sampled_tokens=sum(rollout.sampled_tokens for rollout in groups.rollouts),
                    trained_tokens=sum(len(sample) for sample in batch),
                )
                metrics = stats | taught | speed | synced | engine_counts(self.collector.engine)
                metrics |= env_metrics(env, groups)
                metrics |= {f"{PREFIX}{name}": float(count) for name, count in self.parts.lost().items()}
                log_step = partial(self.record.step, step, groups, batch, logprobs, metrics)
                state = replace(
                    begun,
                    step=step + 1,
                    probe=sync.probe,
                    probe_base=sync.base,
                    sampler_states=await scheduler.sampler_states(),
                )
                with part("save"):
                    whole = await checkpoints.done(state, log_step)
                await self.callbacks.call("on_step", step, groups, whole)

    async def credit(self, groups: Groups) -> tuple[SampleBatch, dict[str, float]]:
        """Return a batch's samples, with advantages from rewards or the teacher, and the teacher's metrics."""
        run = self.run
        if self.teacher is not None:
            with self.clock.part("teacher"):
                return await taught_samples(run, groups, self.teacher, self.collector)
        level, estimator = run.credit, run.advantage_estimator
        if level == "value":
            return await asyncio.to_thread(value_samples, groups, self.trainer.values, run.gae), {}
        batch = await asyncio.to_thread(
            build_samples, groups, advantage_estimator=estimator, merge=run.merge, credit=level
        )
        return batch, {}

    def rollout_ended(self, rollout: Rollout) -> None:
        """Report a training rollout that has ended to the progress display and the callbacks."""
        self.record.log.rollout_ended()
        self.callbacks.on_rollout(rollout)

    def new_sync(self, probe: Sequence[int], base: Sequence[float] = ()) -> WeightSync:
        """Return a weight sync to the engine, which still has the base model's weights.

        `probe` and `base` are the `probe` and `probe_base` of the `RunState`; `base` is empty in a new run.
        """
        trainer, engine = self.trainer, self.collector.engine
        return WeightSync(trainer, engine, probe, self.run.sampling, tolerance=self.run.probe_tolerance, base=base)


def schedule_of(run: RunConfig) -> Schedule:
    """Return the schedule of a run's rollouts."""
    return Schedule(
        prompts_per_step=run.prompts_per_step,
        group_size=run.group_size,
        oversample=run.oversample,
        max_staleness=run.max_staleness,
        rest_epochs=run.rest_epochs,
        solved=run.solved,
        seed=run.seed,
        by_turn=run.credit == "turn",
        branching=run.branching if run.credit == "branches" else None,
    )


def _probe(groups: Groups) -> list[int]:
    """Return the first ids, at most `PROBE`, of the first segment in the batch that belongs to the policy.

    Raises:
        AgentGymError: If no rollout has such a segment.
    """
    for segment in (segment for rollout in groups.rollouts for segment in rollout.segments):
        if not segment.model:
            ids: list[int] = segment.token_ids[:PROBE].tolist()
            return ids
    raise AgentGymError("rollouts: the first batch has no sampled tokens, so there is nothing to train on")


@asynccontextmanager
async def open_callbacks(
    run: RunConfig, record: Recorder, given: Sequence[Callback], *, first: bool
) -> AsyncIterator[Callbacks]:
    """Open a run's trackers, and notify all callbacks when the run starts and if it fails.

    The callbacks are the trackers, `Watch` and the user's callbacks (`given`). Only the first process has callbacks.
    """
    folder, alert = record.log.folder, record.log.alert
    told = Callbacks(alert)
    try:
        if first:
            for name in run.report_to:
                told.callbacks += [await asyncio.to_thread(open_tracker, name, folder, run.name, flat(run))]
            told.callbacks += [Watch(alert, record.log.rows), *given]
            await told.call("on_run_start", run, folder)
        yield told
    except BaseException:
        await told.failed()
        raise


def new_folder(recipe: str) -> Path:
    """Create the folder runs/RECIPE/TIME for a run without an output_dir. No other run gets the same folder."""
    return names.new_folder(Path("runs") / recipe)


def is_first() -> bool:
    """Return whether this is the process that reports for the run."""
    return os.environ.get("RANK", "0") == "0"


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for, sandboxes included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
