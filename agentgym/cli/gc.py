"""The command `agentgym gc`: removal of what killed runs left."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from agentgym.cli.output import say
from agentgym.errors import SandboxError
from agentgym.process_identity import dead_folders, is_dead, remove_folder


def gc(dry_run: bool = False) -> int:
    """Remove what killed runs left on this machine: containers, and folders with their sockets.

    For example:
    $ agentgym gc --dry-run
    $ agentgym gc

    Args:
        dry_run: Say what would be removed, and remove nothing.
    """
    verb = "would remove" if dry_run else "removed"
    left = [*_dead_containers(), *_dead_folders()]
    for what, remove in left:
        if not dry_run:
            remove()
        say(f"{verb} {what}")
    if not left:
        say("nothing of ours is left over")
    return 0


def _dead_containers() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name each container whose owner is dead, and how to remove it; none where no engine runs."""
    from agentgym.sandboxes.docker_client import connect

    try:
        client = connect(timeout_s=30)
    except (SandboxError, ImportError) as error:
        say(f"containers not looked at: {error}")
        return
    try:
        for container in client.containers(all=True, filters={"label": "agentgym.owner"}):
            if is_dead(container["Labels"]["agentgym.owner"]):
                name = f"container {container['Id'][:12]} ({container['State']})"
                yield name, partial(_remove, client, container["Id"])
    finally:
        client.close()


def _remove(client: Any, container: str) -> None:
    from docker.errors import APIError

    try:
        client.remove_container(container, v=True, force=True)
    except APIError as error:
        if error.status_code not in (404, 409):  # Gone, or being removed.
            raise


def _dead_folders() -> Iterator[tuple[str, Callable[[], object]]]:
    for folder in dead_folders():
        yield f"folder {folder}", partial(remove_folder, folder)
