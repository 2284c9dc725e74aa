"""A recipe that sends itself a signal at a given moment: `stopped_script.py MOMENT SIGNAL [FLAG...]`."""

import importlib.abc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import agentgym as ag
from agentgym.cli.recipe import Stop
from agentgym.run.metrics_logger import MetricsLogger
from recipes import chase_grpo

MOMENT, SIGNAL = sys.argv.pop(1), signal.Signals[sys.argv.pop(1)]


def send() -> None:
    os.kill(os.getpid(), SIGNAL)


stops: list[Stop] = []
begun = Stop.__init__


def remember(self: Stop) -> None:
    begun(self)
    stops.append(self)


Stop.__init__ = remember  # type: ignore[method-assign]


class Importing(importlib.abc.MetaPathFinder):
    """Sends the signal while torch is being imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch.nn":
            send()


def before(owner: Any, name: str, *, call: int = 0, times: int = 1) -> None:
    """Send the signal when this function is called, after `call` earlier calls."""
    work: Callable[..., Any] = getattr(owner, name)
    left = iter([False] * call + [True] * times)

    def sending(*arguments: Any, **named: Any) -> Any:
        if next(left, False):
            send()
        return work(*arguments, **named)

    setattr(owner, name, sending)


def noted(moment: str, *, steps: int = 0) -> None:
    """Send the signal when the run starts this activity, with this many steps finished."""
    note = MetricsLogger.note

    def sending(self: MetricsLogger, doing: str) -> None:
        note(self, doing)
        if doing == moment and len(self.rows) == steps:
            send()

    MetricsLogger.note = sending  # type: ignore[method-assign]


def logged(*, steps: int) -> None:
    """Send the signal when this step's line has been logged."""
    log = MetricsLogger.__call__

    def sending(self: MetricsLogger, step: int, metrics: Any) -> None:
        log(self, step, metrics)
        if step + 1 == steps:
            send()

    MetricsLogger.__call__ = sending  # type: ignore[method-assign]


def endless(*_: Any) -> dict[str, float]:
    """Replace a step by one that ignores its cancellation; send a second signal when the first has been handled."""
    send()
    while not any(stop.number for stop in stops):
        pass
    send()
    threading.Event().wait()
    raise AssertionError


def arm() -> None:
    if MOMENT == "importing":
        sys.meta_path.insert(0, Importing())
    elif MOMENT in ("loading", "rollouts"):
        noted(MOMENT, steps=int(MOMENT == "rollouts"))
    elif MOMENT == "evaluation":
        noted("held-out evaluation")
    elif MOMENT == "last evaluation":
        noted("held-out evaluation", steps=3)
    elif MOMENT == "training":
        from agentgym.train.learner import Learner

        before(Learner, "train", call=1)
    elif MOMENT == "syncing":
        from agentgym.weight_sync.sync import WeightSync

        before(WeightSync, "__call__", call=1)
    elif MOMENT == "logged":
        logged(steps=2)
    elif MOMENT == "twice":  # a step that never ends, and a second Ctrl-C
        from agentgym.train.learner import Learner

        Learner.train = endless  # type: ignore[assignment, method-assign]
    elif MOMENT == "holding":
        from agentgym.train.trainer import Trainer

        before(Trainer, "snapshot", call=1)
    elif MOMENT == "writing":
        import agentgym.train.checkpoint

        before(agentgym.train.checkpoint, "write_step", call=1)
    else:
        raise ValueError(MOMENT)


arm()
ag.main(chase_grpo.RECIPE)
