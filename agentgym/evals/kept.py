"""The folder of an evaluation: its settings, its rollouts as they end, and its summary."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentgym.environments.env import Env
from agentgym.environments.mixture import parameter_values
from agentgym.errors import AgentGymError
from agentgym.evals.evaluation import Evaluation, mean_reward, solved_in
from agentgym.foreign_files.content import Unpacker, read_object
from agentgym.run.folder_lock import hold_folder, make_folder
from agentgym.run.settings import SETTINGS, begun_envs, versions
from agentgym.run.tasks.content import EnvVersion, as_json, warn_of_other_envs
from agentgym.store.reader import RolloutStore
from agentgym.store.rows import packed, task_fields
from agentgym.store.schema import FILE
from agentgym.store.vocabulary import TokenBytes
from agentgym.store.writer import RolloutWriter
from agentgym.types import Group, Rollout, Sampling, Task

PHASE = "eval"
"""The phase of an evaluation's rollouts in its store."""
SUMMARY = "summary.json"
"""The file in the folder that holds the scores, once all is played."""
MUST_AGREE = ("env", "env_args", "model", "models", "split", "seed", "sampling", "group_size")
"""Settings that a resumed evaluation must have as it was begun; it may have more or fewer tasks and rollouts."""


def settings_of(
    *,
    env: type[Env[Any]],
    model: str,
    models: Mapping[str, str],
    split: str | None,
    seed: int,
    sampling: Sampling | None,
    group_size: int | None,
) -> dict[str, Any]:
    """Return what an evaluation was begun with, as its folder keeps it.

    `split` is None for tasks that were given, `group_size` where no reward depends on the other rollouts of a task.
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
    }


class KeptRollouts:
    """Writes each rollout of an evaluation into the folder's store as it ends, and knows those that are there."""

    def __init__(self, folder: Path, store: RolloutWriter, played: dict[str, Rollout]) -> None:
        self.folder, self._store = folder, store
        self.played = played
        """Rollouts that an earlier process played, by their ids."""

    def name_tokens(self, token_bytes: TokenBytes) -> None:
        """Keep the bytes of each token id that occurs in the rollouts from now on."""
        self._store.vocabulary.token_bytes = token_bytes

    def add(self, task: Task, rollouts: Sequence[Rollout]) -> None:
        """Return when rollouts of a task are on disk together, so that they outlive the process; it blocks."""
        self._store.add([Group(group_id=task.id, rollouts=tuple(rollouts), task=task)], phase=PHASE, step=0)
        self._store.flush()

    def finish(self, evaluation: Evaluation) -> None:
        """Write the summary; AgentGymError where a rollout could not be kept, so that `resume` would play it again."""
        content = _finite(summary_of(evaluation))
        (self.folder / SUMMARY).write_text(json.dumps(content, allow_nan=False, indent=2) + "\n")
        if self._store.lost:
            raise AgentGymError(f"out: {self._store.lost} rollouts could not be written to {self._store.path}")


@contextmanager
def kept_in(
    folder: Path,
    settings: Mapping[str, Any],
    envs: Mapping[str, EnvVersion],
    tasks: Sequence[Task],
    *,
    resume: bool,
    retry_failed: bool,
) -> Iterator[KeptRollouts]:
    """Hold the folder of an evaluation, and keep its rollouts there.

    Without `resume` the folder must hold no evaluation. With it, what is there is not played again; with `retry_failed`
    the rollouts without a reward are. Raises ValueError, naming the field, where settings or tasks are not those that
    it was begun with. Logs a warning for an env whose version or files are other ones.
    """
    make_folder(folder)
    with hold_folder(folder):
        if (folder / FILE).is_file() and not resume:
            raise ValueError(f"out: {folder} holds rollouts already; resume it, or name another folder")
        if resume and (folder / SETTINGS).is_file():
            _check_settings(folder, settings)
            warn_of_other_envs(begun_envs(folder), envs)
        else:
            content = {**settings, "versions": versions(), "envs": as_json(envs)}
            (folder / SETTINGS).write_text(json.dumps(content, indent=2) + "\n")
        with RolloutWriter(folder, done=1) as store:  # the rollouts of step 0 stay
            played = _played(folder, {task.id: task for task in tasks}, retry_failed)
            yield KeptRollouts(folder, store, played)


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    try:
        begun = read_object(folder / SETTINGS, within=folder)
    except ValueError as error:
        raise ValueError(f"out: {folder / SETTINGS} cannot be read ({error}); name another folder") from error
    for name in MUST_AGREE:
        if begun.get(name) != settings[name]:
            raise ValueError(
                f"{name}: {folder} was begun with {begun.get(name)!r}, and this is {settings[name]!r}; "
                "give the same, or name another folder"
            )


def _played(folder: Path, tasks: Mapping[str, Task], retry_failed: bool) -> dict[str, Rollout]:
    """The rollouts of these tasks by their ids, of two with one id the later."""
    found: dict[str, Rollout] = {}
    with RolloutStore(folder) as store:
        for stored in store.find(phase=PHASE):
            if stored.rollout.group_id in tasks:
                found[stored.rollout.rollout_id] = stored.rollout
        for name in {rollout.group_id for rollout in found.values()}:
            if store.task(name) != Unpacker().unpacked(packed(task_fields(tasks[name]))):
                raise ValueError(
                    f"tasks: task {name!r} is not what it was when {folder} was begun; name another folder"
                )
    return {name: one for name, one in found.items() if one.reward is not None or not retry_failed}


def summary_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores of an evaluation, with their intervals, and those of each task."""
    ks = sorted({1, evaluation.k})
    return {
        "reward": evaluation.reward,
        "reward_interval": evaluation.interval()._asdict(),
        "pass_at": {str(k): evaluation.pass_at(k) for k in ks},
        "pass_at_interval": {str(k): evaluation.pass_at_interval(k)._asdict() for k in ks},
        "pass_hat": {str(k): evaluation.pass_hat(k) for k in ks},
        "pass_hat_interval": {str(k): evaluation.pass_hat_interval(k)._asdict() for k in ks},
        "k": evaluation.k,
        "rollouts": len(evaluation.rollouts),
        "failed": evaluation.failed,
        "failures": evaluation.failures,
        **evaluation.account(),
        "tasks": {group.group_id: _summary_of_task(group) for group in evaluation.groups},
    }


def _summary_of_task(group: Group) -> dict[str, Any]:
    return {"scored": len(group.scored), "solved": solved_in(group), "reward": mean_reward(group)}


def _finite(value: Any) -> Any:
    """The value with None for each number that JSON has no form for: a score of no rollout."""
    if isinstance(value, dict):
        return {name: _finite(of) for name, of in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
