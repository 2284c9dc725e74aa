"""Callbacks: what hears the events of a run, such as a tracker of experiments or code of the user's."""

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from agentgym.config_fields import nearest, require_instance
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
    """Call the methods in a thread, one at a time, because they block; `on_rollout` is always called on the event loop,
    where code that blocks holds up all rollouts."""

    def on_run_start(self, run: RunConfig, folder: Path) -> None:
        """Take the settings of a run that begins, or goes on, in this folder."""

    def on_rollout(self, rollout: Rollout) -> None:
        """Take a rollout for training when it has ended."""

    def on_step(self, step: int, groups: Groups, metrics: Mapping[str, float]) -> None:
        """Take the number of a step that is done, the groups that were trained on, and the step's metrics."""

    def on_evaluation(self, step: int, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """Take a held-out evaluation after so many steps, and its metrics, whose names begin with `eval/`."""

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Take the summary of a run that has ended; it is empty if the run failed or was stopped."""


def checked_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the callbacks of a run.

    Raises:
        ValueError: One is not a callback, has a method that is async or a generator, or one for an event that there is
            not.
    """
    if not isinstance(callbacks, Iterable):
        raise ValueError(f"callbacks: must be a list of ag.Callback, got {callbacks!r:.80}")
    checked = list(callbacks)
    events = get_args(Event)
    for callback in checked:
        require_instance("callbacks", callback, Callback)
        named = type(callback).__name__
        for event in events:
            method = getattr(callback, event)
            if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
                raise ValueError(
                    f"callbacks: {named}.{event} is async, and is called, not awaited; make it a plain method"
                )
            if inspect.isgeneratorfunction(method):
                raise ValueError(f"callbacks: {named}.{event} yields, so that calling it does nothing; return instead")
        for name in (each for each in dir(callback) if each.startswith("on_") and each not in events):
            if callable(getattr(callback, name)):
                raise ValueError(f"callbacks: {named}.{name} is no event of a run; {nearest(name, events)}")
    return checked


@dataclass(slots=True)
class Callbacks:
    """Calls every callback of a run; one that raises is counted in `errors` and reported once, and the run goes on."""

    alert: Callable[[str], None]
    """A function that tells the user a sentence."""
    callbacks: list[Callback] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """How often each method has raised, by its class and its name."""
    ended: bool = False
    """Whether they were told that the run has ended, which they are told once."""
    _one: threading.Lock = field(default_factory=threading.Lock)
    """Held while a method is called in a thread: a call that the run no longer waits for goes on until it returns."""

    async def call(self, event: Event, *told: Any) -> None:
        """Tell all of them of an event."""
        if self.ended:
            return
        self.ended = event == "on_run_end"
        for callback in self.callbacks:
            if callback.in_thread:
                await asyncio.to_thread(self._call_alone, callback, event, *told)
            else:
                self._call(callback, event, *told)

    def on_rollout(self, rollout: Rollout) -> None:
        """Tell all of them of a rollout that has ended."""
        for callback in self.callbacks:
            self._call(callback, "on_rollout", rollout)

    def _call_alone(self, callback: Callback, event: Event, *told: Any) -> None:
        with self._one:
            self._call(callback, event, *told)

    def _call(self, callback: Callback, event: Event, *told: Any) -> None:
        # Copies: what a callback changes in a mapping is its own.
        given = [deepcopy(dict(each)) if isinstance(each, Mapping) else each for each in told]
        try:
            getattr(callback, event)(*given)
        except (Exception, asyncio.CancelledError) as error:  # a plain method is never cancelled by others
            name = f"{type(callback).__name__}.{event}"
            self.errors[name] += 1
            if self.errors[name] == 1:
                self.alert(f"{name} raised {describe(error)}; it is called again, and the run goes on.")
