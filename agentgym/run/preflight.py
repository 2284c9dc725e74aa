"""Checks of a run that don't need a model."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.data.chosen import overlap, refuse_twice
from agentgym.data.content import refuse_unkept
from agentgym.environments.env import Env, Split
from agentgym.environments.env_version import env_versions, warn_of_other_envs
from agentgym.environments.limits import Limits
from agentgym.environments.mixture import Mixture
from agentgym.environments.task_rows import compared, first_tasks, is_data, shared_ids, split_tasks
from agentgym.files.folder_lock import LOCK, LockedFolder, files_in, hold_folder, make_folder
from agentgym.hub import exists
from agentgym.rollouts.branches.play import check_branching
from agentgym.run.metrics.environment import FILE as SURROUNDINGS
from agentgym.run.metrics.plot import PLOT
from agentgym.run.metrics_logger import METRICS
from agentgym.run.recorder import SUMMARY
from agentgym.run.resume import (
    BEST,
    CHECKPOINTS,
    POLICIES,
    read_best,
    refuse_fewer_steps,
    refuse_lost_checkpoints,
    refuse_second_run,
)
from agentgym.run.tasks.envs import members_of
from agentgym.sandboxes.choose import Kind
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.store.run_settings import (
    SETTINGS,
    begun_envs,
    is_run,
    refuse_changes,
    refuse_other_format,
    write_settings,
)
from agentgym.store.schema import FILE as STORE
from agentgym.tools.images import image_in
from agentgym.types.messages import SEE_ELSEWHERE

if TYPE_CHECKING:
    from agentgym.engines.base import Engine
    from agentgym.run.config import RunConfig

_LOG = logging.getLogger(__name__)
FOLDERS = (CHECKPOINTS, BEST, *POLICIES.values())
"""The subfolders of a run's folder."""
LOOKED_AT = 32
"""Number of tasks per split that are checked for images and for fields that can't be stored."""
FILES = (LOCK, SETTINGS, METRICS, STORE, SURROUNDINGS, SUMMARY, PLOT)
"""The files in a run's folder."""


def warn_of_engine_limits(env: type[Env[Any]], engine: "Engine") -> None:
    """Log a warning, with what to change, if the env allows more context than the engine has.

    An env that leaves limits.context_tokens at its default isn't checked. If one of its rollouts reaches the engine's
    limit, a warning is logged at that time.
    """
    wanted, held = env.limits.context_tokens, engine.context_tokens
    if wanted > held and wanted != Limits().context_tokens:
        _LOG.warning(
            "%s.limits.context_tokens is %d, but rollouts end at the engine's context of %d tokens; set "
            "engine.context_tokens to %d if the model and the memory allow it, or limits.context_tokens to %d",
            *(env.__name__, wanted, held, wanted, held),
        )


def check_data_types(trained: str, sampled: str) -> None:
    """Check that the engine computes the policy in the trainer's data type, so that both round it alike.

    If only the engine rounds to 16 bits, a warning is logged: the trainer's log-probabilities are exact, and the gap
    is that of the engine's rounding. If only the trainer does, the gap grows with the update.

    Args:
        trained: The data type that the trainer computes in, such as float32.
        sampled: The data type of the engine's weights; "" if it is unknown.

    Raises:
        ValueError: If the trainer computes in 16 bits, and the engine in float32.
    """
    known = {"float32", "bfloat16", "float16"}
    if trained == sampled or not {trained, sampled} <= known:
        return
    agree = (
        f"set --train.dtype {sampled}, or --engine.dtype {trained} (for SGLang, "
        f'--engine.arguments="--dtype {trained}"), so that both round alike'
    )
    if sampled == "float32":
        raise ValueError(
            f"train.dtype: the trainer computes in {trained} but the engine in float32, so their log-probabilities "
            f"drift apart with each step; {agree}"
        )
    _LOG.warning(
        "train.dtype: the trainer computes in %s and the engine in %s, which adds to the mismatch of their "
        "log-probabilities; %s",
        *(trained, sampled, agree),
    )


@contextmanager
def hold_checked(run: "RunConfig", env: type[Env[Any]], folder: Path | None) -> Iterator[LockedFolder | None]:
    """Check all that needs no model, write the run's settings, and lock the run's folder until the `with` ends.

    Only the first process uses the folder. On the other processes, `folder` may be None.

    Yields:
        The locked folder, or None on every process but the first.

    Raises:
        ValueError: If a check fails. The message names the setting.
    """
    _refuse_without_tasks(run, env)
    _refuse_tasks(run, env)
    for each in members_of(env) if run.credit == "branches" else ():
        check_branching(each, run.branching)
    run.check_files()
    if any(each.sandbox_spec is not None for each in members_of(env)):
        _refuse_sandbox(run.sandbox)
    if int(os.environ.get("RANK", "0")):
        yield None
        return
    assert folder is not None
    if run.resume is None:
        _make_folder(folder)
    elif not exists(folder / SETTINGS):
        refuse_changes(folder, run)  # not a run's folder, so nothing is written there
    _refuse_twice(run, env)
    _warn_of_overlap(run, env)
    _refuse_in_the_way(folder, "output_dir" if run.resume is None else "resume")
    with hold_folder(folder) as held:
        if run.resume is None:
            refuse_second_run(folder)
        else:
            refuse_other_format(folder)
            refuse_changes(folder, run)
            refuse_lost_checkpoints(folder)
            refuse_fewer_steps(folder, run.max_steps)
            read_best(folder)  # raises before a model is loaded
        envs = env_versions(env)
        warn_of_other_envs(begun_envs(folder), envs)
        write_settings(folder, run, envs)
        yield held


def _refuse_sandbox(kind: Kind) -> None:
    """Raise ValueError if sandboxes of this kind can't run here."""
    why_not = {"docker": why_no_docker, "bubblewrap": why_no_bubblewrap}.get(kind, lambda: None)()
    if why_not is not None:
        raise ValueError(
            f"sandbox: {kind} doesn't work here: {why_not}. `agentgym doctor` lists what works and how to install the "
            "rest; `--sandbox auto` uses the best one"
        )


def _make_folder(folder: Path) -> None:
    """Create a new run's folder.

    Raises:
        ValueError: If it can't be created, or if it contains files that aren't a run's.
    """
    make_folder(folder)
    held = files_in(folder)
    if held and not is_run(folder):
        raise ValueError(f"output_dir: {folder} contains {held[0]!r} but no run; use a new or an empty folder")


def _refuse_in_the_way(folder: Path, field: str) -> None:
    """Raise ValueError if a file is where the run needs a folder, or a folder is where the run needs a file.

    `field` is the setting that gave the folder; the message begins with it.
    """
    for path in (folder / name for name in FOLDERS):
        if os.path.lexists(path) and not path.is_dir():
            raise ValueError(f"{field}: {path} is a file, but a run needs a folder there; move it away")
    for path in (folder / name for name in FILES):
        if path.is_dir():
            raise ValueError(f"{field}: {path} is a folder, but a run needs a file there; move it away")


def _refuse_without_tasks(run: "RunConfig", env: type[Env[Any]]) -> None:
    test = min(run.eval_tasks, 1)
    in_play = (
        run.prompts_per_step * (run.max_staleness + 1) + run.oversample.extra_groups
    )  # no task occurs twice among these groups
    if not issubclass(env, Mixture):
        _refuse_too_few(env, run, train=in_play if run.max_steps else 0, test=test)
        return
    most = env.most(in_play, run.max_steps)
    for name, member in env.members.items():
        _refuse_too_few(member.env, run, train=most[name], test=test)


def _refuse_twice(run: "RunConfig", env: type[Env[Any]]) -> None:
    """Raise ValueError if two of the run's tasks have the same id.

    Training tasks are only checked if they are rows of a data set, not if they are made from an index.
    """
    for each in members_of(env) if run.max_steps else ():
        if is_data(tasks := split_tasks(each, "train")):
            refuse_twice(tasks, f"{each.__name__}.tasks('train')")
    if run.eval_tasks:
        refuse_twice(first_tasks(split_tasks(env, "test"), run.eval_tasks), f"{env.__name__}.tasks('test')")


def _warn_of_overlap(run: "RunConfig", env: type[Env[Any]]) -> None:
    """Log a warning, with an example, if some of the run's held-out tasks are also training tasks.

    If the tasks of a split are made from an index, only some of them are compared.
    """
    if not (run.max_steps and run.eval_tasks):
        return
    for each in members_of(env):
        train, test = split_tasks(each, "train"), split_tasks(each, "test")[: run.eval_tasks]
        listed = is_data(train) and is_data(test)
        wrong = overlap({"train": train, "test": test}) if listed else shared_ids(*compared(train, test), listed=False)
        if wrong is not None:
            _LOG.warning("%s.tasks: %s", each.__name__, wrong)


def _refuse_tasks(run: "RunConfig", env: type[Env[Any]]) -> None:
    """Raise ValueError if a tool or one of the first tasks has an image, or a task has a field that can't be stored.

    An image in a later task is refused in its rollout.
    """
    for each in members_of(env):
        tasks = _first_played(run, each)
        if (found := image_in(each, tasks)) is not None:
            raise ValueError(f"env: {found}, but training supports only text; {SEE_ELSEWHERE}")
        refuse_unkept(tasks)


def _first_played(run: "RunConfig", env: type[Env[Any]]) -> list[Any]:
    """Return the first tasks of each split that the run uses."""
    rollouts: dict[Split, int] = {"train": run.max_steps, "test": run.eval_tasks}
    return [
        task for split, many in rollouts.items() if many for task in first_tasks(split_tasks(env, split), LOOKED_AT)
    ]


def _refuse_too_few(env: type[Env[Any]], run: "RunConfig", *, train: int, test: int) -> None:
    for split, least in {"train": train, "test": test}.items():
        if not least:
            continue
        try:
            count = len(split_tasks(env, split))
        except NotImplementedError:
            raise ValueError(
                f"env: {env.__name__} declares no tasks; define `@classmethod def tasks(cls, split)`, which "
                'returns a sequence of tasks for "train" and another one for "test"'
            ) from None
        if count < least:
            field = "prompts_per_step" if split == "train" else "eval_tasks"
            more = {"max_staleness": run.max_staleness, "oversample.extra_groups": run.oversample.extra_groups}
            set_too = [name for name, value in more.items() if value and split == "train"]
            why = f", because prompts_per_step and {' and '.join(set_too)} need that many at once" if set_too else ""
            raise ValueError(
                f"{field}: {env.__name__}.tasks({split!r}) has {count} tasks, but at least {least} are needed{why}"
            )
