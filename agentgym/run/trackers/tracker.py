"""Trackers of experiments: trackio, wandb and TensorBoard behind one protocol."""

import asyncio
import importlib
import inspect
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from agentgym.errors.tracebacks import describe
from agentgym.scheduling.accounting import Groups
from agentgym.types.rollout import Rollout

TrackerName: TypeAlias = Literal["trackio", "wandb", "tensorboard"]
"""The name of a tracker, which is that of its package."""
Sink: TypeAlias = Callable[[int, Mapping[str, float]], object]
"""A function that takes a step's number and its figures."""
OnStep: TypeAlias = Callable[[int, Groups, Mapping[str, float]], object]
"""A function that takes a step's number, the groups that were trained on, and the figures."""
OnRollout: TypeAlias = Callable[[Rollout], object]
"""A function that takes a rollout when it has ended."""


class Tracker(Protocol):
    """Takes the figures of a run; its methods block, and are called from one thread at a time."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of one step, or of the evaluation after so many steps."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """Take the run's summary, empty where the run has failed, and return when all is written."""
        ...


def open_tracker(name: TrackerName, folder: Path, recipe: str, settings: Mapping[str, Any]) -> Tracker:
    """Open the tracker of that name for the run in `folder`; a resumed run goes on where it was.

    Accounts and servers are the package's own business: WANDB_MODE=offline keeps wandb in the run's folder. Raises
    ValueError where its package is not installed, or it cannot be opened.
    """
    try:
        package = importlib.import_module("tensorboard.summary" if name == "tensorboard" else name)
    except ImportError:
        raise ValueError(f"track: {name} is not installed; `pip install {name}`, or leave it out") from None
    try:
        return _KINDS[name](package, folder.resolve(), recipe, dict(settings))
    except Exception as error:  # whatever the package raises without an account, a network or a disk
        raise ValueError(f"track: {name} cannot be opened: {type(error).__name__}: {error}") from error


class TensorBoard:
    """Writes event files into the run's folder `tensorboard/`."""

    def __init__(self, package: Any, folder: Path, recipe: str, settings: Mapping[str, Any]) -> None:
        self._writer = package.Writer(str(folder / "tensorboard"))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class Wandb:
    """Writes to wandb; its project is the recipe, and its run the folder."""

    def __init__(self, package: Any, folder: Path, recipe: str, settings: Mapping[str, Any]) -> None:
        self._run = package.init(
            project=recipe,
            name=folder.name,
            id=uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex,
            resume="allow",
            dir=str(folder),
            config=settings,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # By a figure of ours: wandb's own step refuses the evaluation that comes after it.
        self._run.log({**figures, "step": step})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary else 1)


class Trackio:
    """Writes to trackio; its project is the recipe, and its run the folder."""

    def __init__(self, package: Any, folder: Path, recipe: str, settings: Mapping[str, Any]) -> None:
        self._package = package
        package.init(project=recipe, name=folder.name, config=settings, resume="allow", embed=False)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._package.log(dict(figures), step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._package.finish()


_KINDS: dict[str, Callable[[Any, Path, str, Mapping[str, Any]], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Calls trackers, sinks and hooks; one that raises is counted in `errors` and said once, and the run goes on.

    Trackers are called in a thread, sinks and hooks on the event loop: what takes long there holds up all rollouts.
    """

    alert: Callable[[str], None]
    """A function that says a sentence to the user."""
    trackers: Mapping[str, Tracker] = field(default_factory=dict)
    sinks: Sequence[Sink] = ()
    on_step: OnStep | None = None
    on_rollout: OnRollout | None = None
    errors: Counter[str] = field(default_factory=Counter)
    """How often each of them has raised, by its name."""

    async def step(self, step: int, groups: Groups, figures: Mapping[str, float]) -> None:
        """Give a step's figures to all of them."""
        await self.figures(step, figures)
        if self.on_step is not None:
            self._guarded("on_step", partial(self.on_step, step, groups, figures))

    async def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Give figures to trackers and sinks."""
        for number, sink in enumerate(self.sinks):
            self._guarded(f"sink {number}", partial(sink, step, figures))
        if self.trackers:
            await asyncio.to_thread(self._track, step, figures)

    def rollout(self, played: Rollout) -> None:
        """Give a rollout that has ended to the hook for it."""
        if self.on_rollout is not None:
            self._guarded("on_rollout", partial(self.on_rollout, played))

    async def close(self, summary: Mapping[str, Any]) -> None:
        """Close every tracker."""
        for name, tracker in self.trackers.items():
            await asyncio.to_thread(self._guarded, f"tracker {name}", partial(tracker.close, summary))

    def _track(self, step: int, figures: Mapping[str, float]) -> None:
        for name, tracker in self.trackers.items():
            self._guarded(f"tracker {name}", partial(tracker.log, step, figures))

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        try:
            if inspect.iscoroutine(answer := call()):
                answer.close()
                raise TypeError("it is async, and is called and not awaited; give a plain function")
        except Exception as error:
            self.errors[name] += 1
            if self.errors[name] == 1:
                self.alert(f"{name} raised {describe(error)}; it is called again, and the run goes on.")
