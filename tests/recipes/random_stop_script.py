"""A recipe that is sent signals at a given moment: `random_stop_script.py NOTES MOMENT [FLAG...]`.

MOMENT is JSON: the fields of `Moment` in order, or null for a run that isn't stopped. NOTES is a file that gets a
line of JSON for each finished part of the run, with its seconds, and one for each finished step.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import agentgym as ag
from agentgym.cli import recipe as command
from agentgym.cli.recipe import Stop
from recipes import chase_grpo


class Moment(NamedTuple):
    """When signals are sent, which ones, and to which process."""

    part: str
    """A part of the run: `opening`, or one that `watch_all` names."""
    occurrence: int
    """Which start of that part in this process, counted from 1."""
    delay_s: float
    """Seconds after that start."""
    signals: list[str]
    """Signals in order; each one after the first is sent when the previous one has been handled."""
    to: str
    """`self` is this process, `parent` is the process that started it, and `group` is the parent's process group, as a
    terminal signals it.
    """


NOTES, GIVEN = Path(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
MOMENT = None if GIVEN is None else Moment(*GIVEN)
FIRST = os.environ.get("RANK", "0") == "0"
begun: Counter[str] = Counter()
start: list[float] = []
"""When opening and closing started."""
heeded = threading.Semaphore(0)


def tell(**fields: Any) -> None:
    """Append a line to the notes, which outlive the process however it ends."""
    if FIRST:
        with NOTES.open("a") as notes:
            notes.write(json.dumps(fields) + "\n")


def send(moment: Moment) -> None:
    for number, name in enumerate(moment.signals):
        if number:
            heeded.acquire()
        if moment.to == "group":
            os.killpg(os.getpgid(os.getppid()), signal.Signals[name])
        else:
            os.kill(os.getpid() if moment.to == "self" else os.getppid(), signal.Signals[name])


def begin(part: str) -> None:
    """Start the timer for the signals if this is their part."""
    begun[part] += 1
    if FIRST and MOMENT is not None and (MOMENT.part, MOMENT.occurrence) == (part, begun[part]):
        timer = threading.Timer(MOMENT.delay_s, send, [MOMENT])
        timer.daemon = True
        timer.start()


def watch(part: str, owner: Any, name: str) -> None:
    work = getattr(owner, name)

    async def watched(*arguments: Any, **named: Any) -> Any:
        begin(part)
        start = time.perf_counter()
        done = await work(*arguments, **named)
        tell(part=part, seconds=time.perf_counter() - start)
        return done

    setattr(owner, name, watched)


def watch_all() -> None:
    from agentgym.engines.sglang.launching.process import ServerProcess
    from agentgym.run.collector import DistributedScheduler
    from agentgym.run.evaluation import Evaluations
    from agentgym.run.resume import CheckpointManager
    from agentgym.train.trainer import Trainer
    from agentgym.weight_sync.sync import WeightSync

    watch("spawning", ServerProcess, "start")
    watch("launching", ServerProcess, "ready")
    watch("collecting", DistributedScheduler, "collect")
    watch("training", Trainer, "step_and_logprobs")
    watch("syncing", WeightSync, "__call__")
    watch("evaluating", Evaluations, "now")
    watch("saving", CheckpointManager, "done")
    hold, enter, leave = CheckpointManager._hold, CheckpointManager.__aenter__, CheckpointManager.__aexit__

    def held(self: CheckpointManager, state: Any, log: Any) -> Any:
        logged = hold(self, state, log)
        tell(finished=state.step)
        return logged

    async def opened(self: CheckpointManager) -> CheckpointManager:
        tell(part="opening", seconds=time.perf_counter() - start[0])
        return await enter(self)

    async def closing(self: CheckpointManager, *error: Any) -> None:
        begin("closing")
        start.append(time.perf_counter())
        await leave(self, *error)

    manager: Any = CheckpointManager
    manager._hold, manager.__aenter__, manager.__aexit__ = held, opened, closing


async def watched_run(run: ag.RunConfig, **named: Any) -> dict[str, Any]:
    watch_all()  # torch is imported by this point
    done: dict[str, Any] = await train(run, **named)
    tell(part="closing", seconds=time.perf_counter() - start[-1])
    return done


def open_stop(self: Stop) -> Stop:
    opened: Stop = enter_stop(self)
    start.append(time.perf_counter())
    begin("opening")
    return opened


def came(self: Stop, number: int, frame: Any) -> None:
    heed(self, number, frame)
    heeded.release()


entry: Any = command
stop: Any = Stop
train, entry.train_policy = entry.train_policy, watched_run
enter_stop, stop.__enter__ = stop.__enter__, open_stop
heed, stop._came = stop._came, came
ag.main(chase_grpo.RECIPE)
