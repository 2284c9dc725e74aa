"""The command `agentgym gc`: removes leftovers of killed runs and of earlier versions."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from agentgym.cli.output import say
from agentgym.errors import SandboxError
from agentgym.files.names import cache_folder
from agentgym.machine.process_identity import dead_folders, remove_folder

if TYPE_CHECKING:
    import docker

    from agentgym.sandboxes.docker.heartbeat import Traces


def gc(dry_run: bool = False, images: bool = False) -> int:
    """Remove what killed runs left: Docker containers, folders with their sockets, and unfinished package folders.

    A run on another machine or in another container counts as killed after five minutes of silence. Images of other
    versions of agentgym are counted, but only removed on request, since another checkout may still use them.

    For example:
    $ agentgym gc --dry-run
    $ agentgym gc
    $ agentgym gc --images

    Args:
        dry_run: Print what would be removed, and remove nothing.
        images: Also remove the sandbox images of other versions that no container uses.
    """
    verb = "would remove" if dry_run else "removed"
    left = [*_left_in_engine(), *_dead_folders(), *(_former_images() if images else ())]
    for what, remove in left:
        if not dry_run:
            remove()
        say(f"{verb} {what}")
    if not left:
        say("nothing to remove")
    if not images:
        _count_former_images()
    return 0


def _former_images() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each image of other versions, and a function that removes it; nothing if no Docker engine runs."""
    from agentgym.sandboxes.docker.images.former import former_images, remove_former

    with _engine() as client:
        if client is not None:
            for image in former_images(client):
                yield str(image), partial(remove_former, client, image)


def _count_former_images() -> None:
    from agentgym.sandboxes.docker.images.former import former_images

    with _engine(told=True) as client:
        found = former_images(client) if client is not None else []
    if found:
        size_mb = sum(image.size_mb for image in found)
        say(f"{len(found)} images of other versions take up to {size_mb} MB; remove them with `agentgym gc --images`")


@contextmanager
def _engine(*, told: bool = False) -> "Iterator[docker.APIClient | None]":
    """Yield a connection to the Docker engine, or None if none runs.

    In the latter case, the reason is printed unless the user was already `told`.
    """
    from agentgym.sandboxes.docker.client import connect

    try:
        client = connect(timeout_s=30)
    except (SandboxError, ImportError) as error:
        if not told:
            say(f"containers were not checked: {error}")
        yield None
        return
    with closing(client):
        yield client


def _left_in_engine() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each thing that an ended program left in the Docker engine, and a function that removes it.

    Yields nothing if no Docker engine runs.
    """
    from agentgym.sandboxes.docker.heartbeat import remove_container, remove_volume

    with _engine() as client:
        if client is None:
            return
        for left in _ended_clients(client):
            for container in left.containers:
                name = f"container {container['Id'][:12]} ({container['State']})"
                yield name, partial(remove_container, client, container["Id"])
            for volume in left.volumes:
                yield f"heartbeat {volume}", partial(remove_volume, client, volume)


def _ended_clients(client: Any) -> "list[Traces]":
    """Return what programs that have ended left in the Docker engine.

    A program whose process isn't visible from here is checked twice: it has ended if it stays silent.
    """
    from agentgym.sandboxes.docker.heartbeat import LOOKS_S, Lookout, engine_time, traces

    lookout = Lookout()
    ended = lookout.ended(found := traces(client), engine_time(client))
    if lookout.silent:
        say(
            "some agentgym programs on other machines or in other containers have shown no sign of life lately and may "
            f"have ended; checking them again in {LOOKS_S:.0f} s"
        )
        time.sleep(LOOKS_S)
        ended = lookout.ended(found := traces(client), engine_time(client))
    return [found[token] for token in ended]


def _dead_folders() -> Iterator[tuple[str, Callable[[], object]]]:
    from agentgym.sandboxes.docker.images import package_folder

    places = (None, package_folder.cache_folder(), cache_folder("gguf"))
    for folder in (left for place in places for left in dead_folders(place)):
        yield f"folder {folder}", partial(remove_folder, folder)
