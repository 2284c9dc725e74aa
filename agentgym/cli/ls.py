"""The command `agentgym ls`: lists the available environments."""

from typing import Annotated

import tyro

from agentgym.cli.envs.names import add_working_folder, env_files, find, loaded, place
from agentgym.cli.output import say
from agentgym.environments.registry import find_env, gallery, installed, registered
from agentgym.errors import AgentGymError


def ls(
    envs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[ENV ...]")] = (),
) -> int:
    """List the environments in */env.py and envs/*/env.py, in installed packages and the gallery, and those given.

    For example:
    $ agentgym ls
    $ agentgym ls my_package.my_env:MyEnv my_env.py:MyEnv

    Args:
        envs: More environments, as module:Class or path/env.py:Class.
    """
    add_working_folder()
    broken = [line for line in map(loaded, env_files()) if line]
    found = dict(registered())
    ours = [name for name in gallery() if name not in found]
    try:
        names = [*installed(), *ours, *envs]
    except ValueError as error:  # two packages use the same name
        names = [*ours, *envs]
        broken.append(str(error))
    for name in names:
        try:
            found[name] = find_env(name) if name in ours else find(name)
        except (AgentGymError, ValueError) as error:
            broken.append(str(error))
    for name, cls in sorted(found.items()):
        say(f"{name:<20}  {place(cls):<40}  {_first_line(cls)}".rstrip())
    for line in broken:
        say(line)
    return 1 if broken else 0


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]
