"""The record of a run: its metrics, its rollouts, and the report at its end."""

import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
from agentgym.store.run_settings import SETTINGS, with_defaults
from agentgym.store.schema import FILE as STORE
from agentgym.store.training_step import trained_segments
from agentgym.store.vocabulary import TokenBytes
from agentgym.store.writer import RolloutWriter
from agentgym.types.arrays import Floats
from agentgym.types.sample import Sample

SUMMARY = "summary.json"
"""The file in the run's folder with the summary that `train_policy` returns."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Stores a run's metrics and rollouts. Only the first process writes.

    Methods that block on disk I/O say so in their docstrings. The recorder isn't a `Callback`, because a step's
    rollouts and metrics must be on disk before its checkpoint.
    """

    log: MetricsLogger
    store: RolloutWriter | None
    """Stores the run's rollouts; None on every process but the first."""
    report: Report
    solved: float = 1.0
    """Minimum reward that counts as solved."""
    held: LockedFolder | None = None
    """The run's folder, locked by this process; None on every process but the first."""
    texts: dict[str, bytes] = field(default_factory=dict)
    """By file name, the contents of files written only at the start of the run. A removed file is written again."""
    reward_failures: RewardFailures = field(default_factory=RewardFailures)
    turn: threading.RLock = field(default_factory=threading.RLock)
    """Lock that is held while the recorder follows its folder to a new path, until everything is written there."""

    def follow(self) -> Change | None:
        """Follow the run's folder to its current path. Blocks on disk I/O.

        If the folder was removed, it is recreated with the settings, metrics and rollouts so far. If that fails, the
        failure is counted and reported, and the next call tries again.

        Returns:
            What happened to the folder since the last call, or None if nothing did.

        Raises:
            FolderInUse: If another process now uses the folder.
        """
        if self.held is None:
            return None
        with self.turn:
            try:
                change = self.held.follow()
                self._gone_to(change)
                if change is None or not change.lost:
                    self._follow_files()
            except OSError as error:  # it was removed again just now
                self.log.disk.refused(str(self.held.path), str(error), then="it was removed; trying again later")
                return None
            return change

    def _follow_files(self) -> None:
        """Rewrite files that were removed from the folder, and warn once about each."""
        folder = self.log.folder
        said = [found] if (found := self.log.follow_file()) else []
        for name in [each for each in self.texts if is_gone(folder / each)]:
            write = partial(write_whole, folder / name, self.texts[name])
            if self.log.disk.attempt(name, write, then="the run continues without it"):
                said.append(f"{folder / name} was removed; writing it again.")
        if self.store is not None and self.store.is_removed():
            said.append(f"{self.store.path} was removed; writing it again.")
            self.store.follow(folder, lost=True)
        for each in said:
            self.log.alert(each)

    def leave(self) -> Change:
        """Continue in a new folder, because another process has taken the run's.

        The stored rollouts stay in the old folder.
        """
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
                self.log.disk.attempt(name, write, then="the run continues without it")
            elif name not in self.texts:
                with suppress(OSError, UnreadableFileError):
                    self.texts[name] = read_bytes(self.log.folder / name, within=self.log.folder)

    def follow_model(self, found: Mapping[str, Any]) -> None:
        """Add the values of settings whose default depends on the model to the run's settings. Blocks on disk I/O."""
        self._add(SETTINGS, partial(with_defaults, found=found), then="a resumed run finds the values again")

    def started(self, facts: Mapping[str, Any]) -> None:
        """Add what is known of the model when the run starts to its surroundings. Blocks on disk I/O."""
        self._add(SURROUNDINGS, lambda content: {**content, "model": dict(facts)}, then="the run continues without it")

    def _add(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]], *, then: str) -> None:
        """Change the content of a JSON file that was written at the start of the run."""
        with self.turn:
            if name not in self.texts:
                return
            text = json.dumps(change(json.loads(self.texts[name])), indent=2) + "\n"
            self.texts[name] = text.encode()
            with suppress(FileNotFoundError):  # the folder was removed just now, and will be written again
                self.log.disk.attempt(name, partial(write_whole, self.log.folder / name, text), then=then)

    def name_tokens(self, token_bytes: TokenBytes) -> None:
        """Store the bytes of each token id that occurs in rollouts added after this call."""
        if self.store is not None:
            self.store.vocabulary.token_bytes = token_bytes

    def collected(self, groups: Groups, *, step: int) -> None:
        """Store a batch's rollouts, including failed ones.

        Warns if, in many rollouts of the run, a reward raised an error or became 0.0 because of content from the
        policy.
        """
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
        """Store the trainer's log-probabilities and the advantages of a collected batch next to its rollouts.

        `scored` has the trainer's log-probabilities of each sample; see `trained_segments`.
        """
        if self.store is not None:  # a generator: the store's thread runs it
            self.store.add_step(trained_segments(groups.rollouts, samples, scored), step=step)

    def evaluated(self, evaluation: Evaluation, *, phase: str, done: int) -> None:
        """Store the rollouts, including failed ones, of a held-out evaluation that followed `done` steps."""
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
        """Log a step with `metrics` and all other metrics of its batch, and return all of them. Blocks on disk I/O."""
        whole = groups.metrics() | batch_metrics(groups, least_solved=self.solved)
        whole |= samples.metrics() | mismatch_metrics(samples, scored)
        whole |= metrics
        self.log(step, whole)
        return whole

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the warnings and the report, and write the summary and the reward plot. Blocks on disk I/O."""
        self.warn()
        if self.store is None:
            return
        for said in account(self.log.rows, self.log.held_out_rewards, summary.get("lost", {})):
            self.log.say(said)
        folder = self.log.folder if self.held is None else self.held.now()
        if folder is None:
            return
        text = json.dumps(strict(summary), allow_nan=False, indent=2) + "\n"
        then = "the run is done, and its result is still returned and printed"
        self._write_last(folder / SUMMARY, text, then=then)
        picture = io.BytesIO()
        if draw_plot(picture, self.log.rows, self.log.held_out_rewards):
            self._write_last(folder / PLOT, picture.getvalue(), then="`agentgym report` can draw it later")
        else:
            self.log.say(f"No {PLOT}: matplotlib is not installed; {install_line('report')}")

    def _write_last(self, file: Path, content: str | bytes, *, then: str) -> None:
        """Write a file of a finished run. If the disk refuses it or the folder is being removed, only report that.

        `then` is the consequence of a failure, worded as the end of a sentence.
        """
        try:
            self.log.disk.attempt(file.name, partial(write_whole, file, content), then=then)
        except FileNotFoundError as error:
            self.log.disk.refused(file.name, str(error), then=then)

    def last_place(self) -> Path:
        """Return the run's folder after the last write, and report what was removed from it. Blocks on disk I/O."""
        folder = self.log.folder
        now = folder if self.held is None else self.held.now()
        if now is None:
            self.log.alert(f"The folder {folder} was removed at the end of the run: its contents are lost.")
            return folder
        if now != folder:
            self.log.alert(f"The folder {folder} was moved to {now} at the end of the run.")
        kept = (METRICS, SETTINGS, STORE) if self.store is not None else ()
        if gone := [name for name in kept if is_gone(now / name)]:
            self.log.alert(f"Files that were removed from {now} at the end of the run are lost: {', '.join(gone)}.")
        self.log.follow(now, lost=False)
        return now

    def flush(self) -> None:
        """Block until everything recorded so far would survive a power failure."""
        self.log.sync()
        if self.store is not None:
            self.store.flush()

    def summary(self) -> dict[str, Any]:
        """Return the run's metrics for its summary. They are complete once the recorder is closed."""
        return {
            **self.log.summary(),
            **self.report.summary(self.log.rows),
            "rollouts_not_stored": 0 if self.store is None else self.store.lost,
            "not_written": dict(self.log.disk.counts),
        }

    def warn(self) -> None:
        """Print warnings on stderr that the user shouldn't miss."""
        for said in self.report.warnings(self.log.rows):
            self.log.alert(said)
        if self.store is not None and self.store.lost:
            said = f"{self.store.lost} rollouts could not be written to {self.store.path}; see the log for the reason."
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
    """Open the recorder of the run in `folder`, which has finished `done` steps.

    When the recorder closes, it writes everything that is pending.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(log)
        store = await stack.enter_async_context(RolloutWriter(folder, done=done)) if first else None
        yield Recorder(log, store, Report(log.rows), solved, held)
