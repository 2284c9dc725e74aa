"""One rank of a run with uneven rollouts and staleness 1; it records everything that blocks the event loop."""

import asyncio
import itertools
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import agentgym as ag
from agentgym.environments.env import Split
from agentgym.machine import time_limits
from agentgym.run.metrics_logger import MetricsLogger
from agentgym.scheduling import Groups
from agentgym.train import Trainer
from agentgym.weight_sync.sync import WeightSync
from tests.run.test_resume import SETTINGS, task

LONGEST_S = 0.05
"""CPU seconds that one callback may use on the loop's thread."""
RANK = int(os.environ["RANK"])
LONG: list[str] = []
WAITS: list[str] = []
STOPS: list[str] = []
HELD: list[int] = []
"""The number of stopped clocks in each part of a sync."""
COUNTING = [False]
AHEAD_S = [0.0]
"""How far the loop's clock is ahead, in seconds."""
RESETS = itertools.count()
ARRIVED = [asyncio.Event() for _ in range(5)]
"""Events that are set when the engine has the policy version with that index."""
LOOP_THREAD = threading.get_ident()
LONG_S = 10_000.0
"""Duration of a part of a sync by the loop's clock: longer than any rollout may take."""


@ag.register("uneven")
class Uneven(ag.Env[ag.Task]):
    """Rollouts have one turn on the first process and eight on the other; longer answers earn less."""

    limits = ag.Limits(turns=1 + 7 * RANK, seconds=600)

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(task, range(10, 99) if split == "train" else range(1))

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[ag.Message], dict[str, Any]]:
        self.said = 0
        self.number = next(RESETS) if self.task.id != "t0" else 0
        return list(self.task.prompt), {}

    async def step(self, message: ag.Message) -> ag.StepResult:
        if self.number % 2:  # this rollout lasts through the training and the sync of the batch before it
            await ARRIVED[self.number // SETTINGS.group_size].wait()
        self.said += len(message["content"])
        return ag.StepResult([ag.Message(role="user", content="Go on.")], -float(self.said), False, False, {})


def counted(self: asyncio.Handle) -> None:
    began = time.thread_time()
    run_handle(self)
    if COUNTING[0] and threading.get_ident() == LOOP_THREAD and (used := time.thread_time() - began) > LONGEST_S:
        LONG.append(f"{used:.3f} s: {self!r}")


def note(what: str) -> None:
    """Record this call and its callers if it happens on the loop's thread."""
    if COUNTING[0] and threading.get_ident() == LOOP_THREAD:
        callers = itertools.islice(traceback.walk_stack(sys._getframe(2)), 4)
        WAITS.append("; ".join([what, *(f"{frame.f_code.co_filename}:{line}" for frame, line in callers)]))


def noted(what: str, call: Any) -> Any:
    def in_its_place(*arguments: Any, **named: Any) -> Any:
        note(what)
        return call(*arguments, **named)

    return in_its_place


def wait(self: threading.Condition, timeout: float | None = None) -> bool:
    """Record waits of futures, events and queues, but not the short wait inside `Thread.start`."""
    if timeout != 0 and sys._getframe(2).f_code is not threading.Thread.start.__code__:
        note("another thread")
    return own_wait(self, timeout)


def audited(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "sqlite3.connect", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree"):
        note(f"disk, {event} {arguments[0]}")


def lasting(call: Any) -> Any:
    """Return the engine's call, which by the loop's clock takes longer than any rollout may."""

    async def in_its_place(*arguments: Any, **named: Any) -> Any:
        HELD.append(len(time_limits._running))
        AHEAD_S[0] += LONG_S
        await asyncio.sleep(0)
        return await call(*arguments, **named)

    return in_its_place


class Ends(ag.Callback):
    """Records the rollouts that end, and why."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def on_rollout(self, rollout: ag.Rollout) -> None:
        self.ended.append(rollout.rollout_id)

    def on_step(self, step: int, groups: Groups, metrics: Mapping[str, float]) -> None:
        STOPS.extend(played.stop_reason for played in groups.rollouts)


def logged(self: MetricsLogger, step: int, metrics: Mapping[str, float]) -> None:
    log(self, step, metrics)
    COUNTING[0] = True  # before this, modules are imported


async def synced(self: WeightSync, version: int) -> dict[str, float]:
    metrics = await sync(self, version)
    ARRIVED[version].set()
    return metrics


async def last(self: Trainer, *error: Any) -> None:
    COUNTING[0] = False  # no more rollouts run
    await close_trainer(self, *error)


log, MetricsLogger.__call__ = MetricsLogger.__call__, logged  # type: ignore[method-assign]
sync, WeightSync.__call__ = WeightSync.__call__, synced  # type: ignore[method-assign]
trainer: Any = Trainer
close_trainer, trainer.__aexit__ = trainer.__aexit__, last
run_handle, asyncio.Handle._run = asyncio.Handle._run, counted  # type: ignore[method-assign]
own_wait, threading.Condition.wait = threading.Condition.wait, wait  # type: ignore[method-assign]
own_time = asyncio.BaseEventLoop.time
asyncio.BaseEventLoop.time = lambda self: own_time(self) + AHEAD_S[0]  # type: ignore[method-assign]
ag.TransformersEngine.load_adapter = lasting(ag.TransformersEngine.load_adapter)  # type: ignore[method-assign]
ag.TransformersEngine.score = lasting(ag.TransformersEngine.score)  # type: ignore[method-assign]
sys.addaudithook(audited)
os.fsync = noted("disk", os.fsync)
for name in (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
):
    setattr(dist, name, noted(name, getattr(dist, name)))


async def main(folder: Path) -> None:
    ARRIVED[0].set()
    run = replace(
        SETTINGS,
        env="uneven",
        output_dir=folder / "run",
        engine=ag.TransformersConfig(slots=6),
        max_staleness=1,
        save_every=1,
        eval_every=2,
    )
    ends = Ends()
    await ag.train_policy(run, callbacks=[ends])
    left = {"long": LONG, "waits": WAITS, "stops": STOPS, "ended": ends.ended, "held": HELD}
    await asyncio.to_thread((folder / f"rank{RANK}.pickle").write_bytes, pickle.dumps(left))


asyncio.run(main(Path(sys.argv[2])))
