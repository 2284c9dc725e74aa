"""The state that a run stores on disk, in addition to the trainer's, so that it can be resumed."""

import asyncio
import errno
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from agentgym.errors import AgentGymError
from agentgym.files.disk import is_gone, is_missing
from agentgym.files.folder_lock import FolderInUse
from agentgym.files.foreign.content import DAMAGE, read_object
from agentgym.files.foreign.values import number, whole
from agentgym.files.replace_folder import written_whole
from agentgym.run.config import RunConfig
from agentgym.run.metrics_logger import METRICS, steps_in
from agentgym.run.recorder import Recorder
from agentgym.train.checkpoint import has_checkpoints, last_step, step_folder

if TYPE_CHECKING:  # torch is loaded when a run starts, not when one is described
    from agentgym.train.snapshot import Snapshot
    from agentgym.train.trainer import Trainer

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

BEST = "best"
"""The subfolder with the adapter (or the fully trained model) of the best evaluation."""
EVALUATION = "evaluation.json"
"""The file in `BEST` with the best evaluation's step and reward."""
CHECKPOINTS = "checkpoints"
"""The subfolder with the checkpoints."""
_TRIES = 3
"""Maximum number of tries of a write. It is repeated if the run's folder or its files are moved or removed
meanwhile.
"""
_REMOVAL_S = 0.3
"""Seconds between two tries of a write."""
POLICIES = {"lora": "adapter", "full": "model"}
"""The subfolder with the trained adapter or model, by train.method."""


class NotSaved(AgentGymError):
    """The trained weights of a finished run couldn't be written to disk. The message describes what is saved."""

    def __init__(self, said: str, folder: Path) -> None:
        super().__init__(said)
        self.folder = folder
        """The run's folder, from which it can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run's state between two steps, as plain values for the checkpoint."""

    step: int = 0
    """Number of finished steps."""
    probe: list[int] = field(default_factory=list)
    """The ids that trainer and engine both score after a sync; empty before the first step."""
    probe_base: list[float] = field(default_factory=list)
    """The trainer's log-probabilities of these ids under the model before training."""
    eval_before: float | None = None
    """Mean reward of the held-out evaluation before the first step; None if there was none."""
    sampler_states: list[dict[str, Any]] = field(default_factory=list)
    """The state of every process's task sampler, in rank order."""


_RUN_STATE = TypeAdapter(RunState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The evaluation of the policy in `BEST`."""

    step: int
    """Number of steps finished before the evaluation."""
    reward: float
    """The evaluation's mean reward."""


def read_best(folder: Path) -> Best | None:
    """Return the evaluation of the policy in the run's `BEST` folder, or None if there is no such folder.

    Raises:
        ValueError: If it can't be read.
    """
    file = folder / BEST / EVALUATION
    if not (folder / BEST).exists():
        return None
    try:
        said = read_object(file, within=folder)
        return Best(step=whole(said["step"], "step"), reward=float(number(said["reward"], "reward")))
    except (OSError, *DAMAGE) as error:
        raise ValueError(
            f"resume: {file} can't be read ({type(error).__name__}), so the best policy's reward is unknown; move "
            f"{folder / BEST} elsewhere, and the run saves the best policy from here on"
        ) from None


def policy_folder(run: RunConfig) -> str:
    """Return the name of the subfolder for the trained adapter or model."""
    return POLICIES[run.train.method]


def refuse_second_run(folder: Path) -> None:
    """Raise ValueError if the folder contains trained weights, because a new run needs a separate folder."""
    if has_checkpoints(folder / CHECKPOINTS):
        raise ValueError(f"output_dir: {folder} contains a run's checkpoints; resume that run, or use another folder")
    if (kept := BEST if (folder / BEST).exists() else _trained(folder)) is not None:
        raise ValueError(f"output_dir: {folder} contains a run's trained weights, {kept}/; use another folder")


def refuse_lost_checkpoints(folder: Path) -> None:
    """Raise ValueError if the run in `folder` has trained weights but no checkpoint: resuming would overwrite them."""
    kept = _trained(folder)
    if kept is not None and not has_checkpoints(folder / CHECKPOINTS):
        raise ValueError(
            f"resume: {folder} contains its run's trained weights, {kept}/, but no checkpoint to resume from; restore "
            f"{CHECKPOINTS}/, or start a new run in another folder"
        )


def _trained(folder: Path) -> str | None:
    """Return the name of the run's trained adapter or model folder, or None if there is none or no step finished."""
    kept = next((name for name in POLICIES.values() if (folder / name).is_dir()), None)
    return kept if steps_in(folder / METRICS) else None


def refuse_fewer_steps(folder: Path, steps: int) -> None:
    """Raise ValueError if the run in `folder` has finished more than this many steps."""
    done = last_step(folder / CHECKPOINTS)
    if steps < done:
        raise ValueError(
            f"max_steps: the run in {folder} has finished {done} steps; expected at least {done}, got {steps}"
        )


def load_run_state(trainer: "Trainer", folder: Path, *, resume: bool) -> RunState:
    """Return the state in which the run in `folder` starts: its last complete checkpoint, or an empty state.

    Raises:
        ValueError: If it has checkpoints but none is complete.
    """
    checkpoints = folder / CHECKPOINTS
    if not resume or not trainer.first(lambda: has_checkpoints(checkpoints)):
        return RunState()
    step, saved = trainer.resume(checkpoints)
    return read_run_state(step, saved["progress"])


def read_run_state(step: int, progress: Mapping[str, Any]) -> RunState:
    """Parse a run's state from the checkpoint of this step.

    Raises:
        ValueError: If it isn't a valid state. The message names the field.
    """
    unknown = sorted(progress.keys() - RunState.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(
            f"resume: the checkpoint of step {step} has {', '.join(unknown)}, which this version of agentgym can't "
            f"read; resume with the version that wrote it, or start a new run"
        )
    try:
        return _RUN_STATE.validate_python({**progress, "step": step})
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        field = ".".join(map(str, wrong["loc"]))
        raise ValueError(f"resume: {field} of the checkpoint of step {step}: {wrong['msg']}") from error


@dataclass(frozen=True, slots=True)
class _Kept:
    """The last finished step, in this process's memory."""

    state: RunState
    snapshot: "Snapshot"
    """A copy of everything that the trainer resumes from."""


class CheckpointManager:
    """Saves a run's checkpoints, so that the run can be resumed whenever it stops. Keep it open while the run trains.

    The state after each finished step stays in memory until the next step has finished, so stopping in the middle of a
    step loses only that step. Each process can write its state without calling the others. The metrics and rollouts of
    a step are on disk before its checkpoint. If a checkpoint can't be written to disk, the write is retried after the
    next step, and the previous checkpoint stays intact.

    Args:
        trainer: The run's trainer.
        record: The run's recorder.
        state: The state in which the run starts.
        run: The run's settings.
        files: Texts of additional files next to each adapter and model, by file name.
    """

    def __init__(
        self, trainer: "Trainer", record: Recorder, state: RunState, run: RunConfig, files: Mapping[str, str]
    ) -> None:
        self.state = state
        """The run's current state."""
        self.best: Best | None = None
        """The best evaluation after a step, including those before a resume; None if there was none."""
        self._trainer, self._record, self._run, self._files = trainer, record, run, files
        self._policy = policy_folder(run)
        self._kept: _Kept | None = None
        self._written = state.step
        self._owed = False
        """Whether a checkpoint still has to be written because the last write failed or because it was removed."""
        self._writing = threading.Lock()

    async def done(self, state: RunState, log: Callable[[], T]) -> T:
        """Store a finished step in memory, log it, and write a checkpoint if one is due.

        A cancellation waits for these actions, so that every step that the log reports as done is saved.

        Returns:
            The result of `log`.
        """
        logged: T = await _to_its_end(self._hold, state, log)
        self.state = state
        await self._follow()
        every, last = self._run.save_every, state.step == self._run.max_steps
        if last or self._owed or (every and state.step % every == 0):
            self._owed = not await _to_its_end(self._write_together)
        return logged

    async def _follow(self) -> None:
        """Follow the run's folder to its current path, and check its contents. Every rank must call it."""
        seen = await asyncio.to_thread(self._trainer.first, self._seen)
        folder, self._written, self._owed, self.best = seen  # later collective calls depend on these
        if self._trainer.rank:
            self._record.log.follow(folder, lost=False)

    def _seen(self) -> tuple[Path, int, bool, Best | None]:
        """Follow the run's folder if it was moved, and notice what was removed from it.

        Returns:
            The folder's path, the step of its checkpoint, whether a checkpoint still has to be written, and the best
            policy's evaluation.
        """
        change = self._record.follow()
        self._look(lost=change is not None and change.lost)
        return self._folder, self._written, self._owed, self.best

    def _look(self, *, lost: bool) -> None:
        """Note which of the written folders no longer exist, and warn about each one.

        If `lost`, the whole run folder is known to be gone, so there is no warning.
        """
        said, checkpoint = [], step_folder(self._folder / CHECKPOINTS, self._written)
        if self._written > 0 and is_gone(checkpoint):
            said.append(f"{checkpoint} was removed; writing it again.")
            self._written, self._owed = -1, True
        if self.best is not None and is_gone(self._folder / BEST):
            said.append(f"{self._folder / BEST} was removed; the best policy from here on will be saved there.")
            self.best = None
        for each in () if lost else said:
            self._record.log.alert(each)

    @property
    def _folder(self) -> Path:
        return self._record.log.folder

    async def evaluated(self, reward: float, done: int, *, saved: Path | None = None) -> None:
        """Save the policy after `done` steps in `best/` if its evaluation is the run's best.

        Every rank must call it. On a tie, the earlier policy stays, and a reward of nan is never the best.

        Args:
            reward: Mean reward of the evaluation.
            done: Number of steps finished before it.
            saved: Folder where the policy was saved after that step; it is moved or deleted. If None, the trainer
                saves its current policy.
        """
        await self._follow()
        best = Best(step=done, reward=reward)
        if reward > (-math.inf if self.best is None else self.best.reward):
            said = {**self._files, EVALUATION: json.dumps(asdict(best)) + "\n"}
            keep = self._trainer.save if saved is None else partial(_move, saved.name)
            write = lambda folder: keep(folder / BEST, files=said)  # noqa: E731
            then = f"the policy after {done} steps is the best so far, but {BEST}/ is not updated"
            if await _to_its_end(partial(self.write, f"{BEST}/", write, then=then)):
                self.best = best
        if saved is not None:
            await asyncio.to_thread(shutil.rmtree, saved, ignore_errors=True)

    def write(self, what: str, write: Callable[[Path], object], *, then: str, together: bool = True) -> bool:
        """Call `write` with the run's folder, and return whether the disk accepted the write.

        If the folder is moved or removed meanwhile, the write is repeated at the folder's new path. A write by all
        ranks `together` isn't repeated in that case, and counts as refused.

        If the write is refused, a warning says that `what` couldn't be written, and `then` says what follows from that.
        """
        disk, alone = self._record.log.disk, self._trainer.world == 1 or not together
        for _ in range(_TRIES if alone else 1):
            if alone:
                self._seen()
            folder = self._folder
            try:
                taken = disk.attempt(what, partial(_into, folder, write), then=then)
            except Exception as error:
                if self._is_there(folder) and not (alone and is_missing(error)):
                    raise
                time.sleep(_REMOVAL_S)  # something is removing the folder's files
            else:
                if not alone or self._is_there(folder):
                    return taken
        disk.refused(what, "the run's folder was moved or removed meanwhile", then=then)
        return False

    def _is_there(self, folder: Path) -> bool:
        """Return whether the run's folder is still at this path. Works on every process."""
        held = self._record.held
        return not is_gone(folder) if held is None else held.is_at(folder)

    def _hold(self, state: RunState, log: Callable[[], T]) -> T:
        self._kept = _Kept(state, self._trainer.snapshot())
        return log()

    def _write_together(self) -> bool:
        """Write the checkpoint of the step in memory; return whether the disk accepted it. Every rank must call it."""
        if self._trainer.rank:
            self._attempt()
        return self._trainer.first(self._attempt)

    def _attempt(self) -> bool:
        """Write this rank's part of the checkpoint, and return whether the disk accepted it."""
        if self._trainer.rank and self._alone:  # the first rank has the whole adapter
            self._written = self._written if self._kept is None else self._kept.state.step
            return True
        kept = last_step(self._folder / CHECKPOINTS)
        before = f"the checkpoint of step {kept} stays" if kept else "there is none yet"
        then = f"{before}; the write is retried after the next step, and the run continues"
        return self.write("a checkpoint", self._write, then=then, together=not self._alone)

    def _write(self, folder: Path) -> None:
        """Write this rank's part of the checkpoint of the step in memory, unless it is already written.

        On the first rank, the whole checkpoint is on disk on return. Only the first rank waits for other ranks, and no
        rank makes a collective call.
        """
        kept = self._kept
        if kept is None:
            return
        with self._writing:
            progress = asdict(kept.state)
            step = progress.pop("step")
            if self._written == step:
                return
            self._record.flush()
            checkpoints, run = folder / CHECKPOINTS, {"progress": progress}
            kept.snapshot.write_checkpoint(checkpoints, step, run=run, keep=self._run.keep_checkpoints)
            self._written = step

    def _save(self) -> None:
        """Write the checkpoint of the last finished step, and its adapter or model.

        Raises:
            NotSaved: If the disk doesn't accept the adapter or model. The message says what is on disk.
        """
        if self._kept is None:
            return
        try:
            self._write_last(self._kept.state.step)
        except FolderInUse:
            self._leave()
            self._write_last(self._kept.state.step)

    def _write_last(self, step: int) -> None:
        written = self._attempt()
        if self._trainer.rank:
            return
        can = written or self._run.train.method == "lora"  # a full model is written from its checkpoint
        policy = partial(self.write, f"{self._policy}/", self._write_policy, then="the checkpoint contains it")
        if not (can and policy(together=False)):
            self._say_unsaved(written=written)
        if written and self._written != step and self._alone:  # it was removed meanwhile
            written = self._attempt()
        if not written:
            kept = last_step(self._folder / CHECKPOINTS)
            said = f"The disk accepted no checkpoint after step {kept}: the run can be resumed"
            self._record.log.alert(f"{said} from there, and {self._policy}/ has the weights of step {step}.")

    @property
    def _alone(self) -> bool:
        """Whether this process writes checkpoints without the others."""
        return self._trainer.world == 1 or self._run.train.method == "lora"

    def _write_policy(self, folder: Path) -> None:
        assert self._kept is not None
        if self._alone and self._run.train.method == "full":
            self._write(folder)  # does nothing unless it was removed meanwhile
        checkpoint = step_folder(folder / CHECKPOINTS, self._kept.state.step)
        self._kept.snapshot.write_policy(folder / self._policy, checkpoint, self._files)

    def _leave(self) -> None:
        """Continue in a new folder next to the one that another process has taken.

        Raises:
            NotSaved: If no folder can be created.
        """
        try:
            self._record.leave()
            self._look(lost=True)
        except OSError as error:
            lost = f"({error}): the training after step {max(self._written, 0)} is lost"
            taken = f"output_dir: another process has taken {self._folder}, and no folder can be created next to it"
            raise NotSaved(f"{taken} {lost}", self._folder) from error

    def _say_unsaved(self, *, written: bool) -> None:
        """Raise NotSaved, saying whether the trained weights are in a checkpoint."""
        done, kept = self.state.step, last_step(self._folder / CHECKPOINTS)
        has = f"the checkpoint of step {kept} is saved" if kept else "there is no checkpoint"
        rest = "" if written else f", which continues after step {kept}" if kept else ", which starts over"
        raise NotSaved(
            f"output_dir: {self._folder / self._policy} could not be written to disk. {done} steps are finished, and "
            f"{has}. Free space on the disk, and resume the run{rest}",
            self._folder,
        )

    async def __aenter__(self) -> Self:
        self.best = await asyncio.to_thread(self._trainer.first, partial(read_best, self._folder))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save the last finished step. If no step ran and nothing failed, save only the adapter or model."""
        if self._kept is None and kind is None:
            save = lambda folder: self._trainer.save(folder / self._policy, files=self._files)  # noqa: E731
            if not await asyncio.to_thread(self.write, f"{self._policy}/", save, then="no step was run"):
                self._say_unsaved(written=False)
        try:
            await _to_its_end(self._save)
        except (TimeoutError, AgentGymError) as missing:  # the earlier error, here or on another rank, takes precedence
            if kind is None:
                raise
            _LOG.error("%s", missing)


def _into(folder: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a folder that must exist.

    Raises:
        FileNotFoundError: If the folder is gone; raised before anything is created at its path.
    """
    if is_gone(folder):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    write(folder)


def _move(saved: str, target: Path, *, files: Mapping[str, str]) -> None:
    """Atomically write `target` from the contents of the folder `saved` next to it and the given text files."""
    with written_whole(target) as fresh:
        for path in (target.parent / saved).iterdir():
            path.rename(fresh / path.name)
        for name, text in files.items():
            (fresh / name).write_text(text)


async def _to_its_end(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a thread and return its result. A cancellation is raised only after it has finished."""
    doing = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise
