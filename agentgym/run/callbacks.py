"""Callbacks: what hears the events of a run, such as a tracker of experiments or code of the user's."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from agentgym.config_fields import require_instance
from agentgym.errors.tracebacks import describe
from agentgym.evals.evaluation import Evaluation
from agentgym.run.config import RunConfig
from agentgym.scheduling.accounting import Groups
from agentgym.types.rollout import Rollout

Event: TypeAlias = Literal["on_run_start", "on_rollout", "on_step", "on_evaluation", "on_run_end"]
"""The name of a method of `Callback`."""


class Callback:
    """Hears the events of a run, on its first process; override the methods that you need.

    If a method raises, this is reported once and counted in the summary's `callback_errors`, and the run goes on.
    """

    in_thread: ClassVar[bool] = False
    """Call the methods in a thread, one after the other, because they block; `on_rollout` never is. What blocks on the
    event loop holds up all rollouts."""

    def on_run_start(self, run: RunConfig, folder: Path) -> None:
        """Take the settings of a run that begins, or goes on, in this folder."""

    def on_rollout(self, rollout: Rollout) -> None:
        """Take a rollout for training when it has ended."""

    def on_step(self, step: int, groups: Groups, metrics: Mapping[str, float]) -> None:
        """Take the number of a step that is done, the groups that were trained on, and the step's metrics."""

    def on_evaluation(self, step: int, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """Take a held-out evaluation after so many steps, and its metrics, whose names begin with `eval/`."""

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Take the summary of a run that has ended; it is empty if the run has failed."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise ValueError for what is no callback, and for one with an async method."""
    for callback in callbacks:
        require_instance("callbacks", callback, Callback)
        for event in get_args(Event):
            if inspect.iscoroutinefunction(getattr(callback, event)):
                named = f"{type(callback).__name__}.{event}"
                raise ValueError(f"callbacks: {named} is async, and is called, not awaited; make it a plain method")


@dataclass(slots=True)
class Callbacks:
    """Calls every callback of a run; one that raises is counted in `errors` and reported once, and the run goes on."""

    alert: Callable[[str], None]
    """A function that tells the user a sentence."""
    callbacks: list[Callback] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """How often each method has raised, by its class and its name."""

    async def call(self, event: Event, *told: Any) -> None:
        """Tell all of them of an event."""
        for callback in self.callbacks:
            if callback.in_thread:
                await asyncio.to_thread(self._call, callback, event, *told)
            else:
                self._call(callback, event, *told)

    def on_rollout(self, rollout: Rollout) -> None:
        """Tell all of them of a rollout that has ended."""
        for callback in self.callbacks:
            self._call(callback, "on_rollout", rollout)

    def _call(self, callback: Callback, event: Event, *told: Any) -> None:
        try:
            getattr(callback, event)(*told)
        except Exception as error:
            name = f"{type(callback).__name__}.{event}"
            self.errors[name] += 1
            if self.errors[name] == 1:
                self.alert(f"{name} raised {describe(error)}; it is called again, and the run goes on.")
