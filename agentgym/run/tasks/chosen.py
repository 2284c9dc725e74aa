"""Selection of a run's training tasks by a file of ids, such as tasks of medium difficulty in an evaluation."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from agentgym.data.chosen import refuse_twice
from agentgym.data.endless import Endless
from agentgym.environments.env import Env, Split
from agentgym.environments.mixture import Member, Mixture, mix
from agentgym.environments.parameters import variant
from agentgym.environments.task_rows import is_data, split_tasks
from agentgym.types.task import Task


def only_tasks(env: type[Env[Any]], file: Path | None) -> type[Env[Any]]:
    """Return the env with only the training tasks whose ids are in the file.

    Held-out tasks stay. The env's tasks are read until all ids are found.

    Args:
        env: The env or mixture.
        file: Text file with one id per line; None returns the env unchanged.

    Raises:
        ValueError: If the file can't be read or has no ids, if an id isn't that of a training task, or if the tasks are
            endless. Also if a member of a mixture has no task in the file.
    """
    if file is None:
        return env
    ids = _ids(file)
    if not issubclass(env, Mixture):
        return _with_tasks(env, ids, file)
    unknown = [name for name in ids if name.partition("/")[0] not in env.members]
    if unknown:
        raise _unknown(file, unknown)
    own = {member: [i.removeprefix(f"{member}/") for i in ids if i.startswith(f"{member}/")] for member in env.members}
    without = [name for name, chosen in own.items() if not chosen]
    if without:
        raise ValueError(f"tasks_from: {file} has no tasks of {', '.join(without)}; add some, or leave that env out")
    return mix({name: Member(_with_tasks(of.env, own[name], file), of.weight) for name, of in env.members.items()})


def _ids(file: Path) -> list[str]:
    try:
        ids = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"tasks_from: {file} cannot be read ({error}); expected a text file with one id per line"
        ) from None
    if not ids:
        raise ValueError(f"tasks_from: {file} contains no ids; write one per line")
    return ids


def _with_tasks(env: type[Env[Any]], ids: Collection[str], file: Path) -> type[Env[Any]]:
    tasks_of_all = split_tasks(env, "train")
    if isinstance(tasks_of_all, Endless):
        raise ValueError(
            f"tasks_from: the training tasks of {env.__name__} are endless, so they can't be searched for ids"
        )
    if is_data(tasks_of_all):
        refuse_twice(tasks_of_all, f"{env.__name__}.tasks('train')")
    found = _found(tasks_of_all, ids)
    if missing := sorted(set(ids) - {task.id for task in found}):
        raise _unknown(file, missing)

    def tasks(cls: type[Env[Any]], split: Split) -> Sequence[Any]:
        return found if split == "train" else env.tasks(split)

    return variant(env, {"tasks": classmethod(tasks)})


def _found(tasks: Sequence[Task], ids: Collection[str]) -> list[Task]:
    """Return the tasks with these ids, in the order of `tasks`."""
    wanted = set(ids)
    found: list[Task] = []
    for index in range(len(tasks)):
        if not wanted:
            break
        task = tasks[index]
        if task.id in wanted:
            wanted.remove(task.id)
            found.append(task)
    return found


def _unknown(file: Path, ids: Sequence[str]) -> ValueError:
    return ValueError(f"tasks_from: {len(ids)} of the ids in {file} match no training task, such as {ids[0]!r}")
