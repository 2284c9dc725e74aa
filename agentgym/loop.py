"""Collect, credit, train, sync: the only file that knows both wings.

A run is `learn(run)`; its parts are functions of their own, for a loop you write yourself::

    play = Play(env, engine, trainer, boxes, sampling)
    async with play.schedule(8, n=8, seed=seed) as rollouts:
        for step in range(steps):
            groups = await rollouts.collect()
            stats = await trainer.step(samples(groups, advantage="dr_grpo"))
            await sync(trainer, engine, step + 1, probe, sampling, tolerance=1e-3)
"""

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from agentgym.env import Env, find_env
from agentgym.errors import EngineError
from agentgym.evaluation import Evaluation
from agentgym.extras import needs_extra
from agentgym.log import Log, Sink, strict
from agentgym.models import find_model
from agentgym.preflight import refuse_early
from agentgym.progress import Saver, begin
from agentgym.report import Report
from agentgym.rollouts.account import Account, raise_if_all_failed
from agentgym.rollouts.draw import Draw, Place, handed_on
from agentgym.rollouts.engine import Engine
from agentgym.rollouts.group import Groups, play_groups
from agentgym.rollouts.local import LocalConfig, LocalEngine
from agentgym.rollouts.oversample import Oversample
from agentgym.rollouts.schedule import Scheduler
from agentgym.rollouts.sglang import SGLangConfig, SGLangEngine
from agentgym.samples import Credit, Estimator, samples
from agentgym.sandboxes.choose import AnyBox, Kind
from agentgym.settings import check_fields
from agentgym.task_rows import as_tasks
from agentgym.train.config import TrainConfig
from agentgym.types import Boxes, Sampling

if TYPE_CHECKING:  # torch is loaded when a run begins: a command line asks for help, or is stopped, before
    from agentgym.train.trainer import Trainer

AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
SUMMARY = "summary.json"
"""In the run's folder: what `learn` returns."""
PROBE = 256
"""Ids that trainer and engine both score after each sync, at most: a server may draw once behind each of them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, every setting in one place and checked; a recipe is a Run with its values spelled out."""

    recipe: str
    """Name of the run, in its folder and its last line."""
    env: str
    """A registered env, or "package.module:Class"."""
    model: Path | str
    """Folder or Hugging Face name of the model to sample from and to train; "tiny" comes with the library."""
    engine: LocalConfig | SGLangConfig = field(default_factory=LocalConfig)
    """What samples: the model in this process, or SGLang servers."""
    train: TrainConfig = field(default_factory=TrainConfig)
    out: Path | None = None
    """Folder of metrics, adapter and checkpoints; runs/RECIPE/TIME without it."""
    resume: Path | None = None
    """Folder of a run that was stopped: go on after its last whole checkpoint, there, as if it had not been."""
    save_every: AtLeast0 = 10
    """Steps from one checkpoint to the next; 0: only at the end and when interrupted."""
    keep: AtLeast1 = 2
    """Checkpoints that stay; the oldest goes first."""
    seed: int = 0
    """Of tasks, sampling and the adapter's start."""
    steps: AtLeast0 = 30
    """Batches collected and trained on."""
    prompts: AtLeast1 = 8
    """Tasks in a batch."""
    group_size: AtLeast1 = 8
    """Rollouts of each task, at least 2: a reward is worth what it is above those of the same task."""
    box: Kind = "auto"
    """Where the model's code runs; auto is what the env declares."""
    oversample: Oversample = field(default_factory=Oversample)
    """Rollouts started beyond need, and when the rest is cut."""
    staleness: AtLeast0 = 0
    """Most policy versions that a group's oldest token may be behind when it is trained on. Above 0, later batches are
    played while one is trained on; 0: one after the other."""
    max_tokens: AtLeast1 | None = None
    """Most tokens in one turn; None leaves it to the env's limits."""
    advantage: Estimator = "dr_grpo"
    """How a rollout's reward becomes its advantage in its group."""
    credit: Credit = "outcome"
    """Whether all tokens of a rollout have its advantage, or each turn that of what came after it."""
    merge: bool = True
    """One sample per segment rather than per turn: the same gradient, each token computed once."""
    eval_tasks: AtLeast0 = 128
    """Held-out tasks, one rollout each, before and after; 0 for none."""
    probe_tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Largest difference of trainer and engine log-probabilities after a sync, in nats."""

    def __post_init__(self) -> None:
        check_fields(self, Run)
        self.oversample.fits(group_size=self.group_size, staleness=self.staleness)
        if self.train.dora and isinstance(self.engine, SGLangConfig):
            raise ValueError("train.dora: SGLang serves no DoRA adapter; leave it out, or sample with --engine local")
        if self.train.loss == "sft":
            raise ValueError("train.loss: sft imitates demonstrations, and a run has rollouts of its own; use ppo")
        if self.group_size < 2:
            raise ValueError("group_size: one rollout has no other of its task to be better than; use at least 2")
        if self.resume is not None and self.out not in (None, self.resume):
            raise ValueError(f"out: a resumed run goes on in its own folder, {self.resume}; set resume alone")

    @property
    def sampling(self) -> Sampling:
        """What the engine is told; the temperature is the one that training scores at."""
        return Sampling(temperature=self.train.temperature, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class Play:
    """What rollouts are played with; under torchrun each process has one, and plays its share."""

    env: type[Env[Any]]
    engine: Engine
    trainer: "Trainer"
    boxes: Boxes | None
    sampling: Sampling
    concurrency: int = 64
    """Rollouts at once, in this process."""

    async def collect(self, tasks: Sequence[Any], *, n: int, seed: int) -> Groups:
        """`n` rollouts of every task, shared out over the trainer's processes; every process gets all of them."""
        mine = tasks[self.trainer.rank :: self.trainer.world]
        groups = await play_groups(
            self.env,
            mine,
            self.engine,
            n=n,
            boxes=self.boxes,
            concurrency=self.concurrency,
            sampling=self.sampling,
            seed=seed,
        )
        found = {group.group_id: group for group in self.trainer.gather(list(groups))}
        whole = Groups([found[task.id] for task in tasks])
        raise_if_all_failed(whole)
        return whole

    @asynccontextmanager
    async def schedule(
        self,
        prompts: int,
        *,
        n: int,
        oversample: Oversample | None = None,
        staleness: int = 0,
        seed: int = 0,
        places: Sequence[Place] = (),
        by_turn: bool = False,
    ) -> AsyncIterator["Rollouts"]:
        """Training batches of `prompts` groups of `n`, one `collect` after the other; see `Scheduler`.

        `places` are what `Rollouts.places` gave in a run that was stopped: this one goes on from there.
        """
        rank, world = self.trainer.rank, self.trainer.world
        draw: Draw[Any] = Draw(
            self.env,
            prompts,
            seed=seed,
            rank=rank,
            world=world,
            by_id=staleness > 0 or (oversample is not None and oversample.carry > 0),
            places=places,
        )
        scheduler: Scheduler[Any] = Scheduler(
            self.env,
            draw,
            self.engine,
            n=n,
            oversample=oversample,
            staleness=staleness,
            boxes=self.boxes,
            concurrency=self.concurrency,
            sampling=self.sampling,
            seed=seed,
            left=handed_on(places, rank),
            by_turn=by_turn,
        )
        async with scheduler:
            yield Rollouts(scheduler, draw, self.trainer, len(range(rank, prompts, world)))

    async def evaluate(self, count: int) -> float:
        """Mean reward over the first `count` held-out tasks, one rollout each."""
        groups = await self.collect(as_tasks(self.env, self.env.tasks("test"))[:count], n=1, seed=0)
        return Evaluation(groups=groups, k=1).reward


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The scheduler of each process as one."""

    scheduler: Scheduler[Any]
    draw: Draw[Any]
    trainer: "Trainer"
    wanted: int
    """Groups that this process plays for a batch."""

    async def collect(self, *, to_come: int | None = None) -> Groups:
        """The next batch; every process gets all of its groups, in the order of their tasks."""
        mine = await self.scheduler.collect(self.wanted, to_come=to_come) if self.wanted else Groups([])
        shares = self.trainer.gather([(mine.groups, mine.account)])
        rows = zip_longest(*(groups for groups, _ in shares))
        accounts = [account for _, account in shares if account is not None]
        whole = Groups([group for row in rows for group in row if group is not None], sum(accounts, start=Account()))
        raise_if_all_failed(whole)
        return whole

    def places(self) -> tuple[Place, ...]:
        """Where every process's rollouts stand, on every process; between two batches."""
        return tuple(self.trainer.gather([self.draw.place(self.scheduler.place())]))


async def sync(
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


async def learn(run: Run, *, sinks: Sequence[Sink] = ()) -> dict[str, Any]:
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


async def _learn(run: Run, sinks: Sequence[Sink]) -> dict[str, Any]:
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
        progress = begin(trainer, folder, resume=run.resume is not None)
        shown = trainer.rank == 0
        log = stack.enter_context(Log(folder, steps=run.steps, shown=shown, done=progress.step, sinks=sinks))
        log.note("loading")
        engine = await stack.enter_async_context(open_engine(run, log.note))
        slots = run.engine.slots
        sandbox = AnyBox(kind=run.box) if env.sandbox and run.box != "auto" else env.sandbox
        boxes = await stack.enter_async_context(sandbox.open(slots)) if sandbox else None
        play = Play(env, engine, trainer, boxes, run.sampling, concurrency=slots)
        if progress.step:
            await sync(trainer, engine, progress.step, progress.probe, run.sampling, run.probe_tolerance)
        else:
            progress = replace(progress, eval_before=await _evaluate(run, play, log, 0))
        async with Saver(trainer, log, progress, steps=run.steps, every=run.save_every, keep=run.keep) as saver:
            await _train(run, play, log, saver, report)
        after = await _evaluate(run, play, log, run.steps)
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


def open_engine(run: Run, progress: Callable[[str], None]) -> AbstractAsyncContextManager[Engine]:
    """The engine that the run asks for, to be opened by `async with`; a server that starts tells `progress`."""
    if isinstance(run.engine, LocalConfig):
        return LocalEngine(run.model, run.engine)
    rank = max(run.engine.max_lora_rank, run.train.lora_rank)
    config = replace(run.engine, max_lora_rank=rank)
    return SGLangEngine(find_model(run.model), config, progress=lambda said: progress(f"server: {said[:40]}"))


async def _train(run: Run, play: Play, log: Log, saver: Saver, report: Report) -> None:
    begun = saver.progress
    probe = begun.probe
    async with play.schedule(
        run.prompts,
        n=run.group_size,
        oversample=run.oversample,
        staleness=run.staleness,
        seed=run.seed,
        places=[Place(**place) for place in begun.places],
        by_turn=run.credit == "turns",
    ) as rollouts:
        for step in range(begun.step, run.steps):
            log.note("rollouts")
            groups = await rollouts.collect(to_come=run.steps - step - 1)
            report.add(groups)
            batch = samples(groups, advantage=run.advantage, merge=run.merge, credit=run.credit)
            log.note("training")
            stats = await play.trainer.step(batch)
            probe = probe or next(s.token_ids[:PROBE].tolist() for r in groups.rollouts for s in r.segments)
            gap = await sync(play.trainer, play.engine, step + 1, probe, run.sampling, run.probe_tolerance)
            log(step, groups.metrics() | batch.metrics() | stats | {"sync/logprob_gap": gap})
            await saver.done(replace(begun, step=step + 1, probe=probe, places=[asdict(p) for p in rollouts.places()]))


async def _evaluate(run: Run, play: Play, log: Log, done: int) -> float | None:
    """The held-out score after `done` steps, in the log; None where the run asks for none."""
    if not run.eval_tasks:
        return None
    log.note("held-out evaluation")
    reward = round(await play.evaluate(run.eval_tasks), 4)
    log.held_out(done, reward)
    return reward


def new_folder(recipe: str) -> Path:
    """Of a run that names none."""
    return Path("runs") / recipe / datetime.now().strftime("%Y%m%d-%H%M%S")


def _cpu_seconds() -> float:
    """Of this process and the children it has reaped, boxes included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
