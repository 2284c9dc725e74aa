"""The command `agentgym gc`: removal of what killed runs left."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from agentgym.cli.output import say
from agentgym.errors import SandboxError
from agentgym.process_identity import dead_folders, remove_folder

if TYPE_CHECKING:
    from agentgym.sandboxes.containers.heartbeat import Traces


def gc(dry_run: bool = False) -> int:
    """Remove what killed runs left: containers of the Docker engine, and folders with their sockets.

    A run of another machine or container that has been silent for five minutes counts as killed.

    For example:
    $ agentgym gc --dry-run
    $ agentgym gc

    Args:
        dry_run: Say what would be removed, and remove nothing.
    """
    verb = "would remove" if dry_run else "removed"
    left = [*_left_in_engine(), *_dead_folders()]
    for what, remove in left:
        if not dry_run:
            remove()
        say(f"{verb} {what}")
    if not left:
        say("nothing of ours is left over")
    return 0


def _left_in_engine() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name what ended clients left in the engine, and how to remove it; nothing where no engine runs."""
    from agentgym.sandboxes.containers.client import connect
    from agentgym.sandboxes.containers.heartbeat import remove_container, remove_volume

    try:
        client = connect(timeout_s=30)
    except (SandboxError, ImportError) as error:
        say(f"containers not looked at: {error}")
        return
    try:
        for left in _ended_clients(client):
            for container in left.containers:
                name = f"container {container['Id'][:12]} ({container['State']})"
                yield name, partial(remove_container, client, container["Id"])
            for volume in left.volumes:
                yield f"heartbeat {volume}", partial(remove_volume, client, volume)
    finally:
        client.close()


def _ended_clients(client: Any) -> "list[Traces]":
    """Look once; where a client is silent, whose process cannot be seen from here, look again after a while."""
    from agentgym.sandboxes.containers.heartbeat import LOOKS_S, Lookout, engine_time, traces

    lookout = Lookout()
    ended = lookout.ended(found := traces(client), engine_time(client))
    if lookout.silent:
        say(f"looking again in {LOOKS_S:.0f} s: a client on another machine or in another container is silent")
        time.sleep(LOOKS_S)
        ended = lookout.ended(found := traces(client), engine_time(client))
    return [found[token] for token in ended]


def _dead_folders() -> Iterator[tuple[str, Callable[[], object]]]:
    for folder in dead_folders():
        yield f"folder {folder}", partial(remove_folder, folder)
