"""Callbacks: what hears the events of a run, such as a tracker of experiments or code of the user's."""

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
"""Seconds that callbacks in threads have at the end of a run that failed or was stopped."""
Event: TypeAlias = Literal["on_run_start", "on_rollout", "on_step", "on_evaluation", "on_run_end"]
"""The name of a method of `Callback`."""


class Callback:
    """Hears the events of a run, on its first process; override the methods that you need.

    If a method raises, this is reported once and counted in the summary's `callback_errors`, and the run goes on. The
    rollouts are those that the run trains on and stores: read them, and change nothing in them.
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
        if isinstance(callback, type):
            raise ValueError(f"callbacks: {callback.__name__} is a class; make an instance, {callback.__name__}()")
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
    _ended: list[Callback] = field(default_factory=list)
    """Those that were told that the run has ended, which each is told once."""
    _one: defaultdict[int, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))
    """By callback, held while a method of it is called in a thread: a call that the run no longer waits for goes on
    until it returns."""
    _in_threads: set[str] = field(default_factory=set)
    """The methods that threads are in."""

    async def call(self, event: Event, *told: Any) -> None:
        """Tell all of them of an event."""
        for callback in self.callbacks:
            await self._tell(callback, event, *told)

    async def failed(self) -> None:
        """Tell those that have not heard the end that the run has failed or was stopped.

        What blocks in threads is left after `GRACE_S` seconds.
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
            self.alert(f"{inside} has not returned in {GRACE_S:g} seconds; the run ends without it.")

    async def _tell(self, callback: Callback, event: Event, *told: Any) -> None:
        if event == "on_run_end":
            self._ended.append(callback)
        if callback.in_thread:
            await _in_daemon(partial(self._call_alone, callback, event, *told))
        else:
            self._call(callback, event, *told)

    def _wait(self) -> None:
        """Return when no thread is in a method any more; it blocks."""
        for lock in list(self._one.values()):
            with lock:
                pass

    def on_rollout(self, rollout: Rollout) -> None:
        """Tell all of them of a rollout that has ended."""
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
            return  # the class does not hear this event
        try:
            method(*map(_own, told))
        except (Exception, asyncio.CancelledError) as error:  # a plain method is never cancelled by others
            name = f"{type(callback).__name__}.{event}"
            self.errors[name] += 1
            if self.errors[name] == 1:
                self.alert(f"{name} raised {describe(error)}; it is called again, and the run goes on.")


def _own(told: Any) -> Any:
    """Return a copy of a mapping or a config for a callback, which may change it."""
    if isinstance(told, Mapping):
        return deepcopy(dict(told))
    return deepcopy(told) if isinstance(told, RunConfig) else told


async def _in_daemon(work: Callable[[], None]) -> None:
    """Do the work in a thread that does not hold up the end of the program."""
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
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=copy_context().run, args=(run,), name="agentgym-callback", daemon=True).start()
    await done
