"""The folder of an evaluation: its settings, its rollouts as they end, and its summary."""

import json
import logging
import math
import shlex
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.data.content import refuse_unkept, same_fields, task_fields
from agentgym.environments.env import Env
from agentgym.environments.env_version import warn_of_other_envs
from agentgym.environments.mixture import parameter_values
from agentgym.evals.evaluation import Evaluation, mean_reward
from agentgym.evals.fingerprints import Fingerprints, hold_models
from agentgym.evals.opening import ChatSettings
from agentgym.files.disk import Refusals, write_whole
from agentgym.files.folder_lock import FolderInUse, LockedFolder, files_in, hold_folder, make_folder
from agentgym.files.foreign.content import read_object
from agentgym.files.foreign.opening import read_bytes
from agentgym.files.held import Change
from agentgym.seeds import VERSION as DERIVATION
from agentgym.store.reader import RolloutStore
from agentgym.store.run_settings import FORMAT, SETTINGS, begun_envs, is_run, refuse_other_format, versions
from agentgym.store.schema import FILE
from agentgym.store.vocabulary import TokenBytes
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Sampling
from agentgym.types.env_version import EnvVersion, as_json
from agentgym.types.rollout import Group, Rollout
from agentgym.types.task import Task

_LOG = logging.getLogger(__name__)
PHASE = "eval"
"""The phase of an evaluation's rollouts in its store."""
SUMMARY = "summary.json"
"""The file in the folder with the scores, which is written after all rollouts have ended."""
MUST_AGREE = (
    "env",
    "env_args",
    "model",
    "models",
    "split",
    "seed",
    "sampling",
    "group_size",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
"""Settings that must be the same when an evaluation is resumed. The number of tasks and of rollouts may grow."""


def settings_of(
    *,
    env: type[Env[Any]],
    model: str,
    models: Mapping[str, str],
    split: str | None,
    seed: int,
    sampling: Sampling | None,
    group_size: int | None,
    chat: ChatSettings,
) -> dict[str, Any]:
    """Return an evaluation's settings as stored in its folder.

    Args:
        env: The env class.
        model: Name of the evaluated model.
        models: Names of the model roles' models.
        split: The split; None if tasks were given instead.
        seed: The seed.
        sampling: The sampling settings; None means the defaults.
        group_size: Rollouts per task if a reward depends on the task's other rollouts, else None.
        chat: How chats with the model are rendered. The template is stored as its text.
    """
    return {
        "env": f"{env.__module__}:{env.__qualname__}",
        "env_args": parameter_values(env),
        "model": model,
        "models": dict(models),
        "split": split,
        "seed": seed,
        "sampling": asdict(sampling or Sampling()) | {"stop": list((sampling or Sampling()).stop)},
        "group_size": group_size,
        "chat_template": chat.template,
        "chat_template_kwargs": dict(chat.variables) or None,
        "tools": None if chat.tools == "auto" else chat.tools,
    }


class KeptRollouts:
    """Stores each rollout of an evaluation in its folder when it ends, and provides those that were stored before."""

    def __init__(self, held: LockedFolder, store: RolloutWriter, played: dict[str, Rollout]) -> None:
        self._held, self._store = held, store
        self._settings = read_bytes(held.path / SETTINGS, within=held.path)
        self._disk = Refusals(_LOG.warning)
        self._turn = threading.Lock()
        self._gone = False
        """Whether the folder was removed and couldn't be recreated. The store then has no file."""
        self._given = len(played)
        self.played = played
        """Rollouts that an earlier process ran, by their ids."""

    def hold_models(self, found: Fingerprints) -> None:
        """Store the fingerprints of the models.

        Raises:
            ValueError: If a fingerprint differs from the one with which the folder was started.
        """
        if not self._follow() or not self._has_settings():
            return
        write = partial(hold_models, self._held.path, found)
        self._disk.attempt(SETTINGS, write, then="a resumed evaluation cannot tell whether its models are the same")
        self._settings = read_bytes(self._held.path / SETTINGS, within=self._held.path)

    def name_tokens(self, token_bytes: TokenBytes) -> None:
        """Store the bytes of each token id that occurs in rollouts added after this call."""
        self._store.vocabulary.token_bytes = token_bytes

    def add(self, task: Task, rollouts: Sequence[Rollout]) -> None:
        """Write a task's rollouts, and block until all of them are on disk, so that they survive the process.

        Rollouts that can't be written stay in memory and are retried with the next ones.
        """
        self._follow()
        self._given += len(rollouts)
        group = Group(group_id=task.id, rollouts=tuple(rollouts), task=task)
        self._store.add([group], phase=PHASE, step=0, whole=False)
        self._store.flush()

    def sign(self, group: Group) -> None:
        """Store the signs that a task's rollouts are suspicious, which result from comparing them with each other.

        Call it after all of the task's rollouts were added.
        """
        self._store.sign(group, phase=PHASE, step=0)

    def finish(self, evaluation: Evaluation) -> None:
        """Write the summary, or report that it can't be written. The evaluation returns its result in either case."""
        if not self._follow():
            return
        text = json.dumps(_finite(summary_of(evaluation)), allow_nan=False, indent=2) + "\n"
        path = self._held.path / SUMMARY
        self._disk.attempt(str(path), lambda: write_whole(path, text), then="the result is still returned")

    @property
    def lost(self) -> int:
        """Number of rollouts that couldn't be stored; final once the folder is closed."""
        return self._given if self._gone else self._store.lost

    def _follow(self) -> bool:
        """Continue at the folder's current path if it was moved, or in a new folder if it was removed or taken.

        A folder is taken if another process uses it.

        Returns:
            Whether there is a folder. If it can't be created, this is reported, and the next call tries again.
        """
        with self._turn:
            try:
                change = self._followed()
            except OSError as error:
                said = "it is retried with the next rollout, and the evaluation continues"
                self._disk.refused(str(self._held.path), str(error), then=said)
                return False
            if change is not None:
                _LOG.warning("%s", change.said)
                self._store.follow(change.path, lost=change.lost)
            self._has_settings()
            return True

    def _followed(self) -> Change | None:
        self._gone = True
        try:
            change = self._held.follow()
        except FolderInUse:
            self._gone = False
            return self._held.leave()
        self._gone = False
        return change

    def _has_settings(self) -> bool:
        """Return whether the folder has its settings. If not, try to write them, and report a failure."""
        path = self._held.path / SETTINGS
        write = partial(write_whole, path, self._settings)
        return path.is_file() or self._disk.attempt(SETTINGS, write, then="the evaluation cannot be resumed without it")


@contextmanager
def kept_in(
    folder: Path,
    settings: Mapping[str, Any],
    envs: Mapping[str, EnvVersion],
    tasks: Sequence[Task],
    fingerprints: Fingerprints,
    *,
    k: int,
    resume: bool,
    retry_failed: bool,
) -> Iterator[KeptRollouts]:
    """Lock an evaluation's folder, and yield an object that stores its rollouts there.

    Without `resume`, the folder must not contain an evaluation. With it, stored rollouts aren't run again, except
    those without a reward if `retry_failed` is set. A warning is logged if the version or the files of the env
    have changed.

    Raises:
        ValueError: If settings, tasks or fingerprints differ from those with which the folder was started, or if the
            folder contains other tasks or more than `k` rollouts of a task. Also if a task has fields that a store
            can't return unchanged. The message names the field.
    """
    refuse_unkept(tasks)
    make_folder(folder)
    with hold_folder(folder) as held:
        if is_run(folder):
            raise ValueError(
                f"output_dir: {folder} is the folder of a training run, not of an evaluation; use another folder (a "
                f"recipe resumes its run with --resume {shlex.quote(str(folder))})"
            )
        begun = _begun(folder)
        if begun is None:
            _refuse_files(folder)
            seeds = {"derivation": DERIVATION, "evaluation": settings["seed"]}
            content = {**settings, "format": FORMAT, "versions": versions(), "seeds": seeds, "envs": as_json(envs)}
            write_whole(folder / SETTINGS, json.dumps(content, indent=2) + "\n")
        elif resume:
            _check_settings(folder, begun, settings)
            refuse_other_format(folder)
            warn_of_other_envs(begun_envs(folder), envs)
        else:
            raise ValueError(
                f"output_dir: {folder} already holds an evaluation; resume it with resume=True (--resume), also with "
                "retry_failed=True (--retry-failed) to run its failed rollouts again, or use another folder"
            )
        hold_models(folder, fingerprints)
        with RolloutWriter(folder, done=1) as store:  # keeps the rollouts of step 0
            played = _played(folder, {task.id: task for task in tasks}, k, retry_failed)
            yield KeptRollouts(held, store, played)


def _begun(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the evaluation in the folder, which may have no rollouts yet, or None if there is none.

    Raises:
        ValueError: If the settings can't be read.
    """
    try:
        begun = read_object(folder / SETTINGS, within=folder)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"output_dir: {folder / SETTINGS} cannot be read ({error}); use another folder") from error
    return begun if "env" in begun else None


def _refuse_files(folder: Path) -> None:
    """Raise ValueError if a folder without an evaluation's settings contains files."""
    if (folder / FILE).is_file():
        raise ValueError(
            f"output_dir: {folder} contains rollouts, but no {SETTINGS} of an evaluation, so it's unknown how they "
            "were made; use another folder"
        )
    if files := files_in(folder):
        raise ValueError(f"output_dir: {folder} contains {files[0]!r} but no evaluation; use a new or an empty folder")


def _check_settings(folder: Path, begun: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name in MUST_AGREE:
        if name == "split" and (begun.get(name) is None) != (settings[name] is None):
            named = "tasks given by the caller" if begun.get(name) is None else f"tasks of the split {begun[name]!r}"
            raise ValueError(f"tasks: {folder} was started with {named}; use the same tasks, or another folder")
        if name == "chat_template" and begun.get(name) != settings[name]:
            raise ValueError(f"{name}: {folder} was started with another one; use the same, or another folder")
        if begun.get(name) != settings[name]:
            raise ValueError(
                f"{name}: {folder} was started with {begun.get(name)!r}, but this is {settings[name]!r}; "
                "use the same value, or another folder"
            )


def _played(folder: Path, tasks: Mapping[str, Task], k: int, retry_failed: bool) -> dict[str, Rollout]:
    """Return the stored rollouts of these tasks by their ids. If two have the same id, the later one is returned."""
    found: dict[str, Rollout] = {}
    with RolloutStore(folder, one_read=True) as store:
        _refuse_fewer(folder, {s.rollout_id: s.group_id for s in store.summaries(phase=PHASE)}, tasks, k)
        for stored in store.find(phase=PHASE):
            found[stored.rollout.rollout_id] = stored.rollout
        for name in {rollout.group_id for rollout in found.values()}:
            if not same_fields(store.task(name) or {}, task_fields(tasks[name])):
                raise ValueError(f"tasks: task {name!r} has changed since {folder} was started; use another folder")
    return {name: one for name, one in found.items() if one.reward is not None or not retry_failed}


def _refuse_fewer(folder: Path, played: Mapping[str, str], tasks: Collection[str], k: int) -> None:
    """Raise ValueError if the scores would omit rollouts that the folder contains.

    These are the rollouts of tasks that aren't in `tasks`, and those beyond the first `k` of a task. `played` has the
    task id of each rollout in the folder, by rollout id.
    """
    if others := sorted(set(played.values()) - set(tasks)):
        all_of = len(others) + len(tasks)
        raise ValueError(
            f"n, tasks: {folder} contains rollouts of {len(others)} tasks that are not among these {len(tasks)}, such "
            f"as {others[0]!r}; include them (n={all_of} if they are the first of the split), or use another folder"
        )
    asked = {f"{name}/{number}" for name in set(played.values()) for number in range(k)}
    if more := sorted(set(played) - asked):
        raise ValueError(
            f"k: {folder} contains more than {k} rollouts of a task, such as {more[0]!r}; use a larger k, or another "
            "folder"
        )


def summary_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation's scores with their intervals, and the scores of each task."""
    ks = sorted({1, evaluation.k})
    return {
        "reward": evaluation.reward,
        "reward_interval": evaluation.interval()._asdict(),
        "rewards": evaluation.named_rewards(),
        "solved_from": evaluation.solved,
        "pass_at": {str(k): evaluation.pass_at(k) for k in ks},
        "pass_at_interval": {str(k): evaluation.pass_at_interval(k)._asdict() for k in ks},
        "pass_hat": {str(k): evaluation.pass_hat(k) for k in ks},
        "pass_hat_interval": {str(k): evaluation.pass_hat_interval(k)._asdict() for k in ks},
        "k": evaluation.k,
        "seed": evaluation.seed,
        "rollouts": len(evaluation.rollouts),
        "failed": evaluation.failed,
        "failures": evaluation.failures,
        **evaluation.calls(),
        **evaluation.account(),
        "tasks": {group.group_id: _summary_of_task(group, evaluation.solved_in(group)) for group in evaluation.groups},
    }


def _summary_of_task(group: Group, solved: int) -> dict[str, Any]:
    return {"scored": len(group.scored), "solved": solved, "reward": mean_reward(group)}


def _finite(value: Any) -> Any:
    """Replace numbers that JSON can't express, such as the mean of no rollouts, with None."""
    if isinstance(value, dict):
        return {name: _finite(of) for name, of in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
