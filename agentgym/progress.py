"""How far a run has come, on disk: what it needs beside the trainer's own state to go on after a stop."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentgym.log import Log
from agentgym.train.checkpoint import has_checkpoints
from agentgym.train.trainer import Trainer

CHECKPOINTS = "checkpoints"
"""In the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands between two steps; plain values, as they are kept."""

    step: int = 0
    probe: list[int] = field(default_factory=list)
    eval_before: float | None = None
    places: list[dict[str, Any]] = field(default_factory=list)
    """Of every process's rollouts."""


def begin(trainer: Trainer, folder: Path, settings: Mapping[str, str], *, resume: bool) -> Progress:
    """Where the run in `folder` starts: at its beginning, or after its last whole checkpoint.

    Raises ValueError for a resumed run whose `settings` were others, and for a new run in the folder of another.
    """
    checkpoints = folder / CHECKPOINTS
    if not resume:
        if trainer.first(lambda: has_checkpoints(checkpoints)):
            raise ValueError(f"out: {folder} holds a run's checkpoints; resume that run, or name another folder")
        return Progress()
    step, saved = trainer.resume(checkpoints)
    for name, value in settings.items():
        if saved["settings"][name] != value:
            raise ValueError(f"{name}: the run to resume has {saved['settings'][name]}, not {value}")
    return Progress(step=step, **saved["progress"])


class Saver:
    """Keeps a run so that it can be gone on with; open while it trains."""

    def __init__(
        self,
        trainer: Trainer,
        log: Log,
        progress: Progress,
        settings: Mapping[str, str],
        *,
        steps: int,
        every: int,
        keep: int,
    ) -> None:
        self.progress = progress
        self._trainer, self._log, self._settings = trainer, log, dict(settings)
        self._steps, self._every, self._keep = steps, every, keep
        self._taken = trainer.optimizer_steps
        self._written = progress.step
        self._writing = threading.Lock()

    async def done(self, progress: Progress) -> None:
        """A step is done; a checkpoint of it is on disk when this returns, where one is due."""
        self.progress, self._taken = progress, self._trainer.optimizer_steps
        if progress.step == self._steps or (self._every and progress.step % self._every == 0):
            await asyncio.to_thread(self._write)

    def _write(self) -> None:
        progress = asdict(self.progress)
        step = progress.pop("step")
        with self._writing:  # an interrupt does not end the thread that is writing already
            if self._written == step:
                return
            self._log.sync()
            kept = {"settings": self._settings, "progress": progress}
            self._trainer.checkpoint(self._log.folder / CHECKPOINTS, step, keep=self._keep, run=kept)
            self._written = step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save the adapter, and where the block was interrupted the last step's checkpoint.

        Saving takes all processes: where one of several failed, the others would wait for it in vain.
        """
        if kind is not None and self._trainer.world > 1:
            return
        self._trainer.save(self._log.folder / "adapter")
        # A step in mid-air cannot be gone on with: it is one that the log does not have.
        if self._trainer.optimizer_steps == self._taken:
            self._write()
