"""Lookup of environments named on the command line: registered names, folders with an env.py, files, and classes."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import tyro

from agentgym.config_fields import nearest
from agentgym.environments.env import Env, Split
from agentgym.environments.parameters import configured, read_arguments
from agentgym.environments.registry import find_env, gallery, import_file, registered
from agentgym.environments.task_rows import as_task, split_tasks
from agentgym.errors import EnvError, boundary
from agentgym.files.foreign.opening import is_file
from agentgym.types.task import Task

Parameters: TypeAlias = Annotated[Mapping[str, str], tyro.conf.Fixed, tyro.conf.Suppress]
"""Values of an env's parameters by name, as given on the command line with --env.NAME."""
NONE: Parameters = MappingProxyType({})
PREFIX = "--env."
"""Prefix of the flags for an env's parameters."""
FILE = "env.py"
"""Name of the file in an environment's folder that defines it."""
LOOKED_AT = 10_000
"""Maximum number of a split's tasks to search for an id."""


def find(name: str, parameters: Parameters = NONE) -> type[Env[Any]]:
    """Return the env class for a name, "module:Class", or the path of a file with or without ":Class".

    A name is a registered one, or that of a folder with an env.py: below the working directory, below envs/, or the
    working directory itself. The path of such a folder works, too.

    Args:
        name: The name.
        parameters: Values of the env's parameters by name, as given on the command line.

    Raises:
        EnvError: If there is no such env, it can't be imported, or it doesn't accept a parameter or value; the
            message lists the possible ones.
    """
    env = _found(name)
    try:
        return configured(env, read_arguments(env, parameters))
    except ValueError as error:
        raise EnvError(f"{PREFIX}{error}") from None


def _found(name: str) -> type[Env[Any]]:
    add_working_folder()
    if ":" not in name and not name.endswith(".py"):
        return _named(name)
    try:
        return find_env(name)
    except ValueError as error:
        raise EnvError(str(error)) from None


def parameters_in(flags: Mapping[str, str]) -> dict[str, str]:
    """Return the values of `--env.NAME` flags by parameter name."""
    return {
        flag.removeprefix(PREFIX).replace("-", "_"): text for flag, text in flags.items() if flag.startswith(PREFIX)
    }


def add_working_folder() -> None:
    """Make modules in the working directory importable, because it isn't on the path of an installed command."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def place(env: type[Env[Any]]) -> str:
    """Return the class's location as "module:Class"."""
    return f"{env.__module__}:{env.__qualname__}"


def own_name(env: type[Env[Any]]) -> str:
    """Return the name under which the class is registered, or its own name."""
    return next((name for name, cls in registered() if place(cls) == place(env)), env.__name__)


def env_files() -> list[Path]:
    """Return the environment files below the working directory: envs/*/env.py, and */env.py that import agentgym."""
    found = [*Path("envs").glob(f"*/{FILE}"), *(path for path in Path().glob(f"*/{FILE}") if _is_ours(path))]
    return sorted(set(found), key=lambda path: (path.parent.name, path))


def _named(name: str) -> type[Env[Any]]:
    """Return the env for a registered name or a folder, after importing the files that may register it."""
    beside = [Path("envs", name), *([Path()] if Path.cwd().name == name else [])]
    for folder in [Path(name), *(beside if name.isidentifier() else [])]:
        if is_file(folder / FILE):
            _import(folder / FILE)  # may register the env by that name; otherwise it is the file's only one
            return dict(registered()).get(Path(name).name) or find(str(folder / FILE))
    broken = 0 if name in dict(registered()) else sum(error is not None for error in map(loaded, env_files()))
    try:
        return find_env(name)
    except ValueError:
        hint = f"; {broken} files did not load (see `agentgym ls`)" if broken else ""
        file = f"{name}.py"
        known = [*dict(registered()), *gallery()]
        meant = f"did you mean {file!r}?" if is_file(file) else nearest(name, known)
        raise EnvError(
            f"there is no environment {name!r:.200}; {meant}{hint}; "
            "create one with `agentgym new`, or give a class as module:Class or path/env.py:Class (the name in its "
            "@ag.register is known only after its module is imported)"
        ) from None


def _import(path: Path) -> None:
    with boundary(EnvError, str(path)):
        import_file(path)


def loaded(path: Path) -> str | None:
    """Import a file of environments, and return the error as one line, or None."""
    try:
        _import(path)
    except EnvError as error:
        return str(error)
    return None


def _is_ours(path: Path) -> bool:
    """Return whether a file mentions agentgym; other files named env.py aren't imported."""
    try:
        return "agentgym" in path.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def task_of(env: type[Env[Any]], split: Split, number: int, task_id: str | None) -> Task:
    """Return the task of a split with this id, or the one at this index if there is no id.

    Args:
        env: The env.
        split: The split.
        number: Index of the task.
        task_id: Id of the task, or None to use `number`.

    Raises:
        EnvError: If there is no such task, or the env's `tasks` fails.
    """
    with boundary(EnvError, f"{env.__name__}.tasks({split!r})"):
        try:
            tasks = split_tasks(env, split)
        except NotImplementedError:
            raise ValueError("the env has no tasks; define `@classmethod def tasks(cls, split)`") from None
        count = len(tasks)
        found = _with_id(tasks, task_id) if task_id is not None else tasks[number] if 0 <= number < count else None
        made: Task | None = None if found is None else as_task(env, found)
    if made is not None:
        return made
    if task_id is None:
        raise EnvError(f"--number: {env.__name__} has {count} {split} tasks, numbered from 0")
    raise EnvError(f"--task: none of the first {min(count, LOOKED_AT)} {split} tasks has the id {task_id!r}")


def _with_id(tasks: Sequence[Any], task_id: str) -> Any:
    """Return the task with that id among the first `LOOKED_AT`, or None."""
    some = (tasks[index] for index in range(min(len(tasks), LOOKED_AT)))
    return next((task for task in some if task.id == task_id), None)
