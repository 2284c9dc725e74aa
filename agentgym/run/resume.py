"""The state of a run on disk: what it needs beside the trainer's own state to go on after a stop."""

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

if TYPE_CHECKING:  # torch is loaded when a run begins, not when one is described
    from agentgym.train.snapshot import Snapshot
    from agentgym.train.trainer import Trainer

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

BEST = "best"
"""The folder of the adapter with the best evaluation, or of the model that was trained whole, in the run's folder."""
EVALUATION = "evaluation.json"
"""The file in `BEST` that says which evaluation it is the best of."""
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints, in the run's folder."""
_TRIES = 3
"""How often something is written whose folder, or whose files, are moved or removed meanwhile."""
_REMOVAL_S = 0.3
"""Seconds before the next try."""
POLICIES = {"lora": "adapter", "full": "model"}
"""The folder of what a run has trained, in the run's folder, by train.method."""


class NotSaved(AgentGymError):
    """The run is done, and its disk does not take what it has trained; the message says what is kept."""

    def __init__(self, said: str, folder: Path) -> None:
        super().__init__(said)
        self.folder = folder
        """The folder of the run, to resume it from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Says where a run stands between two steps; plain values, as they are kept."""

    step: int = 0
    """Steps that are done."""
    probe: list[int] = field(default_factory=list)
    """The ids that trainer and engine both score after a sync; empty before the first step."""
    probe_base: list[float] = field(default_factory=list)
    """The trainer's log-probabilities of these under the model as it was before training."""
    eval_before: float | None = None
    """Mean reward of the held-out evaluation before the first step; None where there was none."""
    sampler_states: list[dict[str, Any]] = field(default_factory=list)
    """The state of every process's task sampler, by rank."""


_RUN_STATE = TypeAdapter(RunState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The evaluation that the policy in `BEST` is the best of."""

    step: int
    """Steps that were done before it."""
    reward: float
    """Its mean reward."""


def read_best(folder: Path) -> Best | None:
    """Return the evaluation of the policy in the run's `BEST`; None if it has none, ValueError if it cannot be read."""
    file = folder / BEST / EVALUATION
    if not (folder / BEST).exists():
        return None
    try:
        said = read_object(file, within=folder)
        return Best(step=whole(said["step"], "step"), reward=float(number(said["reward"], "reward")))
    except (OSError, *DAMAGE) as error:
        raise ValueError(
            f"resume: {file} does not say what the best policy is worth ({type(error).__name__}); move {folder / BEST} "
            "to another place, and the run keeps the best one from here on"
        ) from None


def policy_folder(run: RunConfig) -> str:
    """Return the name of the folder, in the run's, of what the run has trained: an adapter, or a whole model."""
    return POLICIES[run.train.method]


def refuse_second_run(folder: Path) -> None:
    """Raise ValueError where the folder holds what a run has trained: a new run needs a folder of its own."""
    if has_checkpoints(folder / CHECKPOINTS):
        raise ValueError(f"output_dir: {folder} holds a run's checkpoints; resume that run, or name another folder")
    if (kept := BEST if (folder / BEST).exists() else _trained(folder)) is not None:
        raise ValueError(f"output_dir: {folder} holds what a run has trained, {kept}/; name another folder")


def refuse_lost_checkpoints(folder: Path) -> None:
    """Raise ValueError where the run in `folder` has trained, and no checkpoint is left: it would begin over that."""
    kept = _trained(folder)
    if kept is not None and not has_checkpoints(folder / CHECKPOINTS):
        raise ValueError(
            f"resume: {folder} holds what its run has trained, {kept}/, and no checkpoint to go on from; put "
            f"{CHECKPOINTS}/ back, or start a new run in another folder"
        )


def _trained(folder: Path) -> str | None:
    """Return the folder of what the run in `folder` has trained; None where there is none, or no step was done."""
    kept = next((name for name in POLICIES.values() if (folder / name).is_dir()), None)
    return kept if steps_in(folder / METRICS) else None


def refuse_fewer_steps(folder: Path, steps: int) -> None:
    """Raise ValueError where the run in `folder` has done more than this many steps."""
    done = last_step(folder / CHECKPOINTS)
    if steps < done:
        raise ValueError(f"max_steps: the run in {folder} has done {done} steps; give at least {done}, got {steps}")


def load_run_state(trainer: "Trainer", folder: Path, *, resume: bool) -> RunState:
    """Find where the run in `folder` starts: after its last whole checkpoint, or at its beginning where it has none.

    Raises ValueError where it has checkpoints and none of them is whole.
    """
    checkpoints = folder / CHECKPOINTS
    if not resume or not trainer.first(lambda: has_checkpoints(checkpoints)):
        return RunState()
    step, saved = trainer.resume(checkpoints)
    return read_run_state(step, saved["progress"])


def read_run_state(step: int, progress: Mapping[str, Any]) -> RunState:
    """Read what a checkpoint of this step holds of the run; ValueError, which names the field, for anything else."""
    unknown = sorted(progress.keys() - RunState.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(
            f"resume: the checkpoint of step {step} has {', '.join(unknown)}, which this agentgym does not read; "
            f"resume with the agentgym that wrote it, or start a new run"
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
    """A copy of all that the trainer goes on from."""


class CheckpointManager:
    """Keeps a run so that it can be resumed whenever it is stopped; open while it trains.

    The state after each finished step stays in memory until the next one is finished, so a stop in the middle of a
    step loses that step alone. Writing it takes no other process. What was recorded is on disk before a checkpoint is.
    A checkpoint that the disk does not take is tried again after the next step, and the one before it stays whole.
    """

    def __init__(self, trainer: "Trainer", record: Recorder, state: RunState, run: RunConfig) -> None:
        self.state = state
        """Where the run stands."""
        self.best: Best | None = None
        """The best evaluation after a step, of the run that is resumed too; None where there was none."""
        self._trainer, self._record, self._run = trainer, record, run
        self._policy = policy_folder(run)
        self._kept: _Kept | None = None
        self._written = state.step
        self._owed = False
        """Whether a checkpoint is still to be written that the disk did not take, or that was removed."""
        self._writing = threading.Lock()

    async def done(self, state: RunState, log: Callable[[], T]) -> T:
        """Keep a finished step in memory, log it, and write it to disk where a checkpoint is due; return what log does.

        A cancellation waits for each of these: what the log says is done is kept.
        """
        logged: T = await _to_its_end(self._hold, state, log)
        self.state = state
        await self._follow()
        every, last = self._run.save_every, state.step == self._run.max_steps
        if last or self._owed or (every and state.step % every == 0):
            self._owed = not await _to_its_end(self._write_together)
        return logged

    async def _follow(self) -> None:
        """Go on where the run's folder is now, with what is left in it; every rank must call it."""
        seen = await asyncio.to_thread(self._trainer.first, self._seen)
        folder, self._written, self._owed, self.best = seen  # of which later collective calls depend
        if self._trainer.rank:
            self._record.log.follow(folder, lost=False)

    def _seen(self) -> tuple[Path, int, bool, Best | None]:
        """Follow the run's folder; return where it is, its checkpoint's step, if one is owed, and its best policy."""
        change = self._record.follow()
        self._look(lost=change is not None and change.lost)
        return self._folder, self._written, self._owed, self.best

    def _look(self, *, lost: bool) -> None:
        """See what is left of what was written, and say what is gone, unless all was said to be `lost`."""
        said, checkpoint = [], step_folder(self._folder / CHECKPOINTS, self._written)
        if self._written > 0 and is_gone(checkpoint):
            said.append(f"{checkpoint} was removed; it is written again.")
            self._written, self._owed = -1, True
        if self.best is not None and is_gone(self._folder / BEST):
            said.append(f"{self._folder / BEST} was removed; the best policy from here on is kept there.")
            self.best = None
        for each in () if lost else said:
            self._record.log.alert(each)

    @property
    def _folder(self) -> Path:
        return self._record.log.folder

    async def evaluated(self, reward: float, done: int, *, saved: Path | None = None) -> None:
        """Keep what is trained, as it is after `done` steps, in `best/` where none before it was as good.

        Every rank must call it. A tie leaves the earlier one, and a reward that is nan is no better than any. `saved`
        is the folder where it was saved after that step, which is gone then; without it the trainer saves it now.
        """
        await self._follow()
        best = Best(step=done, reward=reward)
        if reward > (-math.inf if self.best is None else self.best.reward):
            said = {EVALUATION: json.dumps(asdict(best)) + "\n"}
            keep = self._trainer.save if saved is None else partial(_move, saved.name)
            write = lambda folder: keep(folder / BEST, files=said)  # noqa: E731
            then = f"the policy after {done} steps is the best so far, and {BEST}/ keeps the one before it"
            if await _to_its_end(partial(self.write, f"{BEST}/", write, then=then)):
                self.best = best
        if saved is not None:
            await asyncio.to_thread(shutil.rmtree, saved, ignore_errors=True)

    def write(self, what: str, write: Callable[[Path], object], *, then: str, together: bool = True) -> bool:
        """Write something into the run's folder, and return whether the disk took it.

        If the folder is moved or removed meanwhile, it is written again where the folder is then; what every rank
        writes `together` counts as not taken.
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
                time.sleep(_REMOVAL_S)  # what removes the folder is at its files
            else:
                if not alone or self._is_there(folder):
                    return taken
        disk.refused(what, "it was moved or removed meanwhile", then=then)
        return False

    def _is_there(self, folder: Path) -> bool:
        """Whether the run's folder is still at this path, where other processes than the first one look, too."""
        held = self._record.held
        return not is_gone(folder) if held is None else held.is_at(folder)

    def _hold(self, state: RunState, log: Callable[[], T]) -> T:
        self._kept = _Kept(state, self._trainer.snapshot())
        return log()

    def _write_together(self) -> bool:
        """Write the checkpoint of the kept step, and return whether the disk took it. Every rank must call it."""
        if self._trainer.rank:
            self._attempt()
        return self._trainer.first(self._attempt)

    def _attempt(self) -> bool:
        """Write this rank's part of the checkpoint, and return whether the disk took it."""
        if self._trainer.rank and self._alone:  # the first rank has the whole adapter
            self._written = self._written if self._kept is None else self._kept.state.step
            return True
        kept = last_step(self._folder / CHECKPOINTS)
        before = f"the one of step {kept} stays" if kept else "there is none yet"
        then = f"{before}, it is tried again after the next step, and the run goes on"
        return self.write("a checkpoint", self._write, then=then, together=not self._alone)

    def _write(self, folder: Path) -> None:
        """Write this rank's part of the checkpoint of the kept step, where it has not yet; on the first one all of it.

        Only on the first rank is anything waited for, and no collective is made.
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
        """Write the checkpoint of the last finished step, and its adapter or its model.

        NotSaved, which says what is on disk, if the disk takes neither.
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
        can = written or self._run.train.method == "lora"  # a whole model is written from its checkpoint
        policy = partial(self.write, f"{self._policy}/", self._write_policy, then="the checkpoint has it")
        if not (can and policy(together=False)):
            self._say_unsaved(written=written)
        if written and self._written != step and self._alone:  # it is gone since
            written = self._attempt()
        if not written:
            kept = last_step(self._folder / CHECKPOINTS)
            said = f"The disk took no checkpoint after the one of step {kept}: the run can be resumed"
            self._record.log.alert(f"{said} from there, and {self._policy}/ is of step {step}.")

    @property
    def _alone(self) -> bool:
        """Whether this process writes checkpoints without the others."""
        return self._trainer.world == 1 or self._run.train.method == "lora"

    def _write_policy(self, folder: Path) -> None:
        assert self._kept is not None
        if self._alone and self._run.train.method == "full":
            self._write(folder)  # which does nothing unless it is gone since
        checkpoint = step_folder(folder / CHECKPOINTS, self._kept.state.step)
        self._kept.snapshot.write_policy(folder / self._policy, checkpoint)

    def _leave(self) -> None:
        """Go on in a new folder beside the one that another process has taken; NotSaved if none can be made."""
        try:
            self._record.leave()
            self._look(lost=True)
        except OSError as error:
            lost = f"({error}): what was trained after step {max(self._written, 0)} is lost"
            taken = f"output_dir: another process has taken {self._folder}, and no folder can be made beside it"
            raise NotSaved(f"{taken} {lost}", self._folder) from error

    def _say_unsaved(self, *, written: bool) -> None:
        """Raise NotSaved: what was trained is in memory alone, or in the checkpoint."""
        done, kept = self.state.step, last_step(self._folder / CHECKPOINTS)
        has = f"the checkpoint of step {kept} is there" if kept else "there is no checkpoint"
        rest = "" if written else f", which goes on after step {kept}" if kept else ", which begins again"
        raise NotSaved(
            f"output_dir: {self._folder / self._policy} could not be written: the disk does not take it. {done} "
            f"steps are "
            f"done, and {has}. Make room on its disk, and resume the run{rest}",
            self._folder,
        )

    async def __aenter__(self) -> Self:
        self.best = await asyncio.to_thread(self._trainer.first, partial(read_best, self._folder))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save the last finished step; adapter or model alone where no step was made and nothing went wrong."""
        if self._kept is None and kind is None:
            save = lambda folder: self._trainer.save(folder / self._policy)  # noqa: E731
            if not await asyncio.to_thread(self.write, f"{self._policy}/", save, then="no step was made"):
                self._say_unsaved(written=False)
        try:
            await _to_its_end(self._save)
        except (TimeoutError, AgentGymError) as missing:  # what went wrong before, here or on another rank, comes first
            if kind is None:
                raise
            _LOG.error("%s", missing)


def _into(folder: Path, write: Callable[[Path], object]) -> None:
    """Write into a folder; FileNotFoundError if it is gone, before anything is made at its place."""
    if is_gone(folder):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    write(folder)


def _move(saved: str, target: Path, *, files: Mapping[str, str]) -> None:
    """Move what a folder beside `target` holds, with these texts beside it, to its place, whole or not at all."""
    with written_whole(target) as fresh:
        for path in (target.parent / saved).iterdir():
            path.rename(fresh / path.name)
        for name, text in files.items():
            (fresh / name).write_text(text)


async def _to_its_end(work: Callable[..., T], *arguments: Any) -> T:
    """Do the work in a thread and return what it does; a cancellation is raised when it is done."""
    doing = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise
