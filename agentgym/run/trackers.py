"""Experiment trackers as callbacks: trackio, wandb and TensorBoard."""

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.evals.evaluation import Evaluation
from agentgym.run.callbacks import Callback
from agentgym.run.config import TrackerName
from agentgym.scheduling.accounting import Groups


class Tracker(Callback):
    """Sends the metrics of steps and evaluations to a tracker's package.

    A resumed run continues its record in the tracker. Configure accounts and servers through the package:
    WANDB_MODE=offline keeps wandb in the run's folder.
    """

    in_thread = True

    def __init__(self, package: Any, folder: Path, recipe: str, settings: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, or of the evaluation after `step` steps."""
        raise NotImplementedError

    def on_step(self, step: int, groups: Groups, metrics: Mapping[str, float]) -> None:
        self.log(step, metrics)

    def on_evaluation(self, step: int, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        self.log(step, metrics)


class TensorBoard(Tracker):
    """Writes event files to `tensorboard/` in the run's folder."""

    def __init__(self, package: Any, folder: Path, recipe: str, settings: Mapping[str, Any]) -> None:
        self._writer = package.Writer(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Logs to wandb: the project is the recipe, and the run is the folder."""

    def __init__(self, package: Any, folder: Path, recipe: str, settings: Mapping[str, Any]) -> None:
        self._run = package.init(
            project=recipe,
            name=folder.name,
            id=uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex,
            resume="allow",
            dir=str(folder),
            config=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # The step is a metric, because wandb's own step rejects an evaluation after a training step of the same number.
        self._run.log({**metrics, "step": step})

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary else 1)


class Trackio(Tracker):
    """Logs to trackio: the project is the recipe, and the run is the folder."""

    def __init__(self, package: Any, folder: Path, recipe: str, settings: Mapping[str, Any]) -> None:
        self._package = package
        package.init(project=recipe, name=folder.name, config=settings, resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._package.log(dict(metrics), step=step)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        self._package.finish()


_KINDS: dict[str, type[Tracker]] = {"trackio": Trackio, "wandb": Wandb, "tensorboard": TensorBoard}


def open_tracker(name: TrackerName, folder: Path, recipe: str, settings: Mapping[str, Any]) -> Tracker:
    """Open the tracker of that name for the run in `folder`.

    Raises:
        ValueError: If its package isn't installed, or if it can't be opened.
    """
    try:
        package = importlib.import_module("tensorboard.summary" if name == "tensorboard" else name)
    except ImportError:
        raise ValueError(
            f"report_to: {name} is not installed; install it with `pip install {name}`, or leave it out"
        ) from None
    try:
        return _KINDS[name](package, folder.resolve(), recipe, dict(settings))
    except Exception as error:  # packages raise anything without an account, a network or a disk
        raise ValueError(f"report_to: {name} could not be opened: {type(error).__name__}: {error}") from error
