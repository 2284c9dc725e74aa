"""The environments that a command names: registered ones, folders with an env.py, files, and classes of modules."""

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
"""Values of an env's parameters by name, as they stand on the command line behind --env.NAME."""
NONE: Parameters = MappingProxyType({})
PREFIX = "--env."
"""What the flags of an env's parameters begin with."""
FILE = "env.py"
"""The file of an environment in a folder of its own."""
LOOKED_AT = 10_000
"""Tasks of a split that are made to find an id."""


def find(name: str, parameters: Parameters = NONE) -> type[Env[Any]]:
    """Return the env class of a name, "module:Class", or the path of a file with or without ":Class".

    A name is a registered one, or that of a folder with an env.py: below the working folder, below envs/, or the
    working folder itself. The path of such a folder is taken, too.

    `parameters` are values of its parameters by name, as they stand on the command line.

    :raises EnvError: where there is none, or it cannot be imported, and where it takes no such parameter or value; the
        message says which ones there are.
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
    """Return the values of `--env.NAME` flags, by the name of the parameter."""
    return {
        flag.removeprefix(PREFIX).replace("-", "_"): text for flag, text in flags.items() if flag.startswith(PREFIX)
    }


def add_working_folder() -> None:
    """Let modules of the working folder be imported; an installed command does not have it on its path."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def place(env: type[Env[Any]]) -> str:
    """Return where the class is, as "module:Class"."""
    return f"{env.__module__}:{env.__qualname__}"


def own_name(env: type[Env[Any]]) -> str:
    """Return the name that the class is registered by, or else its own."""
    return next((name for name, cls in registered() if place(cls) == place(env)), env.__name__)


def env_files() -> list[Path]:
    """Return the files of environments below the working folder: envs/*/env.py, and */env.py that import agentgym."""
    found = [*Path("envs").glob(f"*/{FILE}"), *(path for path in Path().glob(f"*/{FILE}") if _is_ours(path))]
    return sorted(set(found), key=lambda path: (path.parent.name, path))


def _named(name: str) -> type[Env[Any]]:
    """Return the env of a registered name or of a folder; what may register it is imported first."""
    beside = [Path("envs", name), *([Path()] if Path.cwd().name == name else [])]
    for folder in [Path(name), *(beside if name.isidentifier() else [])]:
        if is_file(folder / FILE):
            _import(folder / FILE)  # which may register the env by that name; else it is the file's only one
            return dict(registered()).get(Path(name).name) or find(str(folder / FILE))
    broken = 0 if name in dict(registered()) else sum(error is not None for error in map(loaded, env_files()))
    try:
        return find_env(name)
    except ValueError:
        hint = f"; {broken} files did not load, agentgym ls says why" if broken else ""
        file = f"{name}.py"
        known = [*dict(registered()), *gallery()]
        meant = f"did you mean {file!r}?" if is_file(file) else nearest(name, known)
        raise EnvError(
            f"there is no environment {name!r:.200}; {meant}{hint}; "
            "`agentgym new` makes one, and module:Class or path/env.py:Class names any"
        ) from None


def _import(path: Path) -> None:
    with boundary(EnvError, str(path)):
        import_file(path)


def loaded(path: Path) -> str | None:
    """Import a file of environments; return what went wrong in one line, or None."""
    try:
        _import(path)
    except EnvError as error:
        return str(error)
    return None


def _is_ours(path: Path) -> bool:
    """Whether a file says that it is about agentgym: others of that name are not imported."""
    try:
        return "agentgym" in path.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def task_of(env: type[Env[Any]], split: Split, number: int, task_id: str | None) -> Task:
    """Return a task of a split: the one with that id, or else the one of that number, the first being 0.

    :raises EnvError: where there is none, or the env's `tasks` fails.
    """
    with boundary(EnvError, f"{env.__name__}.tasks({split!r})"):
        try:
            tasks = split_tasks(env, split)
        except NotImplementedError:
            raise ValueError("there is none; give the env `@classmethod def tasks(cls, split)`") from None
        count = len(tasks)
        found = _with_id(tasks, task_id) if task_id is not None else tasks[number] if 0 <= number < count else None
        made: Task | None = None if found is None else as_task(env, found)
    if made is not None:
        return made
    if task_id is None:
        raise EnvError(f"--number: {env.__name__} has {count} tasks to {split}, and the first has the number 0")
    raise EnvError(f"--task: none of the first {min(count, LOOKED_AT)} tasks to {split} has the id {task_id!r}")


def _with_id(tasks: Sequence[Any], task_id: str) -> Any:
    """Return the task of that id among the first ones; None where it is not there."""
    some = (tasks[index] for index in range(min(len(tasks), LOOKED_AT)))
    return next((task for task in some if task.id == task_id), None)
