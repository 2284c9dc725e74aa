"""Callbacks that receive a run's events, such as experiment trackers or user code."""

import asyncio
import inspect
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from agentgym.config_fields import nearest, require_instance
from agentgym.errors.tracebacks import describe
from agentgym.evals.evaluation import Evaluation
from agentgym.run.config import RunConfig
from agentgym.scheduling.accounting import Groups
from agentgym.types.rollout import Rollout

GRACE_S = 30.0
"""Seconds that threaded callbacks get to return after a run failed or was stopped."""
Event: TypeAlias = Literal["on_run_start", "on_rollout", "on_step", "on_evaluation", "on_run_end"]
"""The name of a `Callback` method."""


class Callback:
    """Base class of callbacks, which receive a run's events on its first process. Override the methods that you need.

    If a method raises, the run continues: the method's first error is logged as a warning, and all errors are counted
    under `callback_errors` in the summary. Callbacks get the same rollout objects that the run trains on and stores:
    read them, but don't change them.
    """

    in_thread: ClassVar[bool] = False
    """Whether to call the methods in a thread, one at a time, because they block. `on_rollout` always runs on the
    event loop, where blocking code delays all rollouts.
    """

    def on_run_start(self, run: RunConfig, folder: Path) -> None:
        """Handle the start of a run, or its resumption.

        Args:
            run: The run's settings.
            folder: The run's output folder.
        """

    def on_rollout(self, rollout: Rollout) -> None:
        """Handle a training rollout that has ended.

        Args:
            rollout: The rollout, with its reward or its failure.
        """

    def on_step(self, step: int, groups: Groups, metrics: Mapping[str, float]) -> None:
        """Handle a finished training step.

        Args:
            step: Number of the step, from 0.
            groups: The groups that the step trained on.
            metrics: The step's metrics.
        """

    def on_evaluation(self, step: int, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """Handle the result of a held-out evaluation.

        Args:
            step: Number of steps finished before the evaluation.
            evaluation: The evaluation and its rollouts.
            metrics: The evaluation's metrics, whose names begin with `eval/`.
        """

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Handle the end of the run.

        Args:
            summary: The run's summary; empty if the run failed or was stopped.
        """


def checked_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return a run's callbacks as a list.

    Raises:
        ValueError: If `callbacks` isn't iterable or an item isn't a callback instance. Also if a callback has an event
            method that is async or a generator, or an `on_...` method that doesn't match any event.
    """
    if not isinstance(callbacks, Iterable):
        raise ValueError(f"callbacks: expected a list of ag.Callback, got {callbacks!r:.80}")
    checked = list(callbacks)
    events = get_args(Event)
    for callback in checked:
        if isinstance(callback, type):
            raise ValueError(f"callbacks: {callback.__name__} is a class; pass an instance, {callback.__name__}()")
        require_instance("callbacks", callback, Callback)
        named = type(callback).__name__
        for event in events:
            method = getattr(callback, event)
            if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
                raise ValueError(
                    f"callbacks: {named}.{event} is async, but callbacks aren't awaited; make it a plain method"
                )
            if inspect.isgeneratorfunction(method):
                raise ValueError(
                    f"callbacks: {named}.{event} is a generator, so calling it does nothing; make it a plain method"
                )
        for name in (each for each in dir(callback) if each.startswith("on_") and each not in events):
            if callable(getattr(callback, name)):
                raise ValueError(f"callbacks: {named}.{name} isn't a run event; {nearest(name, events)}")
    return checked


@dataclass(slots=True)
class Callbacks:
    """Calls a run's callbacks, counts their errors in `errors`, and logs the first error of each method."""

    alert: Callable[[str], None]
    """A function that shows the user a warning."""
    callbacks: list[Callback] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """How often each method raised, by "Class.method"."""
    _ended: list[Callback] = field(default_factory=list)
    """The callbacks whose `on_run_end` was called; each is called once."""
    _one: defaultdict[int, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))
    """Locks by callback id. A thread holds a callback's lock while it runs one of the callback's methods, even after
    the run has stopped waiting for the call.
    """
    _in_threads: set[str] = field(default_factory=set)
    """The methods that are running in threads, as "Class.method"."""

    async def call(self, event: Event, *told: Any) -> None:
        """Call the method `event` of every callback, with `told` as its arguments."""
        for callback in self.callbacks:
            await self._tell(callback, event, *told)

    async def failed(self) -> None:
        """Call `on_run_end` with an empty summary, because the run failed or was stopped.

        Callbacks whose `on_run_end` was already called are skipped. Callbacks in threads that still block after
        `GRACE_S` seconds are abandoned, with a warning.
        """
        left = [each for each in self.callbacks if not any(each is told for told in self._ended)]
        for callback in (each for each in left if not each.in_thread):
            await self._tell(callback, "on_run_end", {})
        try:
            async with asyncio.timeout(GRACE_S):
                await asyncio.gather(*(self._tell(each, "on_run_end", {}) for each in left if each.in_thread))
                await _in_daemon(self._wait)
        except TimeoutError:
            inside = ", ".join(sorted(self._in_threads))
            self.alert(f"{inside} has not returned in {GRACE_S:g} seconds; ending the run without waiting for it.")

    async def _tell(self, callback: Callback, event: Event, *told: Any) -> None:
        if event == "on_run_end":
            self._ended.append(callback)
        if callback.in_thread:
            await _in_daemon(partial(self._call_alone, callback, event, *told))
        else:
            self._call(callback, event, *told)

    def _wait(self) -> None:
        """Block until no thread is running a method."""
        for lock in list(self._one.values()):
            with lock:
                pass

    def on_rollout(self, rollout: Rollout) -> None:
        """Call every callback's `on_rollout` for a rollout that has ended."""
        for callback in self.callbacks:
            self._call(callback, "on_rollout", rollout)

    def _call_alone(self, callback: Callback, event: Event, *told: Any) -> None:
        named = f"{type(callback).__name__}.{event}"
        with self._one[id(callback)]:
            self._in_threads.add(named)
            try:
                self._call(callback, event, *told)
            finally:
                self._in_threads.discard(named)

    def _call(self, callback: Callback, event: Event, *told: Any) -> None:
        method = getattr(callback, event)
        if getattr(method, "__func__", None) is getattr(Callback, event):
            return  # the class doesn't override this method
        try:
            method(*map(_own, told))
        except (Exception, asyncio.CancelledError) as error:  # nobody cancels a plain method
            name = f"{type(callback).__name__}.{event}"
            self.errors[name] += 1
            if self.errors[name] == 1:
                self.alert(f"{name} raised {describe(error)}; the run continues and keeps calling it.")


def _own(told: Any) -> Any:
    """Return a copy of a mapping or config, so that a callback may change it; return other values unchanged."""
    if isinstance(told, Mapping):
        return deepcopy(dict(told))
    return deepcopy(told) if isinstance(told, RunConfig) else told


async def _in_daemon(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread, which doesn't keep the program alive, and wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:  # such as SystemExit, which ends the run
            failure = error
        with suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=copy_context().run, args=(run,), name="agentgym-callback", daemon=True).start()
    await done
