"""The record of a run: its metrics, its rollouts, and what its end says of both."""

import io
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.errors.extras import install_line
from agentgym.evals.evaluation import Evaluation
from agentgym.files.disk import is_gone, write_whole
from agentgym.files.folder_lock import LockedFolder
from agentgym.files.foreign.opening import UnreadableFileError, read_bytes
from agentgym.files.held import Change
from agentgym.run.metrics.batch import batch_metrics, mismatch_metrics
from agentgym.run.metrics.environment import FILE as SURROUNDINGS
from agentgym.run.metrics.plot import PLOT, draw_plot
from agentgym.run.metrics_logger import METRICS, MetricsLogger, strict
from agentgym.run.summary import Report, account
from agentgym.samples import SampleBatch
from agentgym.scheduling.accounting import Groups
from agentgym.scheduling.reward_failures import RewardFailures
from agentgym.store.run_settings import SETTINGS
from agentgym.store.schema import FILE as STORE
from agentgym.store.training_step import trained_segments
from agentgym.store.vocabulary import TokenBytes
from agentgym.store.writer import RolloutWriter
from agentgym.types.arrays import Floats
from agentgym.types.sample import Sample

SUMMARY = "summary.json"
"""The file in the run's folder that holds what `train_policy` returns."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes down what a run does; only the first process writes, and the calls that wait for the disk say so.

    It is no `Callback`: a step's rollouts and metrics must be on disk before a checkpoint says that the step is done.
    """

    log: MetricsLogger
    store: RolloutWriter | None
    """None on every process but the first."""
    report: Report
    solved: float = 1.0
    """The least reward that solves a task."""
    held: LockedFolder | None = None
    """The run's folder as this process holds it; None on every process but the first."""
    texts: dict[str, bytes] = field(default_factory=dict)
    """The files that were written once, at the start: a folder that is lost is given them again."""
    reward_failures: RewardFailures = field(default_factory=RewardFailures)
    turn: threading.RLock = field(default_factory=threading.RLock)
    """Held from when a change of the folder is seen until everything is written to the new place."""

    def follow(self) -> Change | None:
        """Go on where the run's folder is now, and return what has happened to it since the last call; it blocks.

        A folder that was removed is made anew with settings, metrics and rollouts so far; if it cannot be made, that is
        counted and said, and the next call tries again. FolderInUse if another process has taken the folder.
        """
        if self.held is None:
            return None
        with self.turn:
            try:
                change = self.held.follow()
                self._gone_to(change)
                if change is None or not change.lost:
                    self._follow_files()
            except OSError as error:  # it is removed again just now
                self.log.disk.refused(str(self.held.path), str(error), then="it was removed, and is tried again")
                return None
            return change

    def _follow_files(self) -> None:
        """Write again what somebody has removed from the folder, and say so once for each file."""
        folder = self.log.folder
        said = [found] if (found := self.log.follow_file()) else []
        for name in [each for each in self.texts if is_gone(folder / each)]:
            write = partial(write_whole, folder / name, self.texts[name])
            if self.log.disk.attempt(name, write, then="the run goes on without it"):
                said.append(f"{folder / name} was removed; it is written again.")
        if self.store is not None and self.store.is_removed():
            said.append(f"{self.store.path} was removed; it is written again.")
            self.store.follow(folder, lost=True)
        for each in said:
            self.log.alert(each)

    def leave(self) -> Change:
        """Go on in a new folder beside the run's, which another process has taken; its rollouts stay there."""
        assert self.held is not None
        with self.turn:
            change = self.held.leave()
            self._gone_to(change, with_store=False)
            return change

    def _gone_to(self, change: Change | None, *, with_store: bool = True) -> None:
        if change is not None:
            self.log.alert(change.said)
            self.log.follow(change.path, lost=change.lost)
            if self.store is not None and with_store:
                self.store.follow(change.path, lost=change.lost)
        for name in (SETTINGS, SURROUNDINGS):
            if change is not None and change.lost and name in self.texts:
                write = partial(write_whole, change.path / name, self.texts[name])
                self.log.disk.attempt(name, write, then="the run goes on without it")
            elif name not in self.texts:
                with suppress(OSError, UnreadableFileError):
                    self.texts[name] = read_bytes(self.log.folder / name, within=self.log.folder)

    def name_tokens(self, token_bytes: TokenBytes) -> None:
        """Keep the bytes of each token id that occurs in the rollouts from now on."""
        if self.store is not None:
            self.store.vocabulary.token_bytes = token_bytes

    def collected(self, groups: Groups, *, step: int) -> None:
        """Keep the rollouts of a batch, failed ones included; say where many of them failed in their rewards."""
        self.report.add(groups)
        for said in self.reward_failures.add(groups.rollouts):
            self.log.alert(said)
        if self.store is not None:
            self.store.add(groups, step=step)

    def trained(
        self,
        groups: Groups,
        samples: Sequence[Sample],
        scored: Mapping[tuple[str, int, int], tuple[Floats, bool]],
        *,
        step: int,
    ) -> None:
        """Keep what the trainer computed for a batch that was collected, beside its rollouts."""
        if self.store is not None:  # a generator: the store's own thread runs it
            self.store.add_step(trained_segments(groups.rollouts, samples, scored), step=step)

    def evaluated(self, evaluation: Evaluation, *, phase: str, done: int) -> None:
        """Keep the rollouts of a held-out evaluation that came after `done` steps, failed ones included."""
        if self.store is not None:
            self.store.add(evaluation.groups, phase=phase, step=done)

    def step(
        self,
        step: int,
        groups: Groups,
        samples: SampleBatch,
        scored: Mapping[tuple[str, int, int], tuple[Floats, bool]],
        metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """Log a step with these and all other metrics of its batch; it blocks."""
        whole = groups.metrics() | batch_metrics(groups, least_solved=self.solved)
        whole |= samples.metrics() | mismatch_metrics(samples, scored)
        whole |= metrics
        self.log(step, whole)
        return whole

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and the picture of the rewards; say what was learned and what was not; it blocks."""
        self.warn()
        if self.store is None:
            return
        for said in account(self.log.rows, self.log.held_out_rewards, summary.get("lost", {})):
            self.log.say(said)
        folder = self.log.folder if self.held is None else self.held.now()
        if folder is None:
            return
        text = json.dumps(strict(summary), allow_nan=False, indent=2) + "\n"
        then = "the run is done, and its result is returned and printed all the same"
        self._write_last(folder / SUMMARY, text, then=then)
        picture = io.BytesIO()
        if draw_plot(picture, self.log.rows, self.log.held_out_rewards):
            self._write_last(folder / PLOT, picture.getvalue(), then="`agentgym report` draws it again")
        else:
            self.log.say(f"No {PLOT}: matplotlib is not installed; {install_line('report')}")

    def _write_last(self, file: Path, content: str | bytes, *, then: str) -> None:
        """Write a file of a run that is done, whatever becomes of its folder meanwhile."""
        try:
            self.log.disk.attempt(file.name, partial(write_whole, file, content), then=then)
        except FileNotFoundError as error:
            self.log.disk.refused(file.name, str(error), then=then)

    def last_place(self) -> Path:
        """Return where the run's folder is when nothing more is written to it, and say what was removed; it blocks."""
        folder = self.log.folder
        now = folder if self.held is None else self.held.now()
        if now is None:
            self.log.alert(f"The folder {folder} was removed at the end of the run: what it held is lost.")
            return folder
        if now != folder:
            self.log.alert(f"The folder {folder} was moved to {now} at the end of the run.")
        kept = (METRICS, SETTINGS, STORE) if self.store is not None else ()
        if gone := [name for name in kept if is_gone(now / name)]:
            self.log.alert(f"What was removed from {now} at the end of the run is lost: {', '.join(gone)}.")
        self.log.follow(now, lost=False)
        return now

    def flush(self) -> None:
        """Return when all that was kept so far outlives a power cut; it blocks."""
        self.log.sync()
        if self.store is not None:
            self.store.flush()

    def summary(self) -> dict[str, Any]:
        """The run in metrics; complete when the record is closed."""
        return {
            **self.log.summary(),
            **self.report.summary(self.log.rows),
            "rollouts_not_stored": 0 if self.store is None else self.store.lost,
            "not_written": dict(self.log.disk.counts),
        }

    def warn(self) -> None:
        """Say on stderr what a user must not overlook."""
        for said in self.report.warnings(self.log.rows):
            self.log.alert(said)
        if self.store is not None and self.store.lost:
            said = f"{self.store.lost} rollouts could not be written to {self.store.path}; the log says why."
            self.log.alert(said)


@asynccontextmanager
async def open_recorder(
    folder: Path,
    log: MetricsLogger,
    *,
    first: bool,
    done: int,
    solved: float = 1.0,
    held: LockedFolder | None = None,
) -> AsyncIterator[Recorder]:
    """The record of the run in `folder`, from where `done` steps are done; what was kept is written when it closes."""
    async with AsyncExitStack() as stack:
        stack.enter_context(log)
        store = await stack.enter_async_context(RolloutWriter(folder, done=done)) if first else None
        yield Recorder(log, store, Report(log.rows), solved, held)
