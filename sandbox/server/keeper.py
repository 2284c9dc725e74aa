"""The keeper of a sandbox: its first process, which forks the supervisors.

The keeper has the host's connection open, but never reads it. No data of any episode passes through the keeper, so a
process that it forks finds nothing of an earlier episode.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from contextlib import suppress

from .limits import PROC, RESET, SANDBOX_KILLED
from .process_tree import kill_all_but

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

    from .arena import Arena

    Supervise = Callable[["Pipe", "Pipe", "Pipe"], NoReturn]
    """Runs a supervisor with three pipes.

    On the first, it hears when it may answer the host. On the second, it reports whether it is in its own namespaces,
    and on the third, that its episode ends.
    """

WORD = struct.Struct("q")
"""Format of a number in a `Pipe`. An episode starts with the number of the reset call before it, or with FIRST."""
FIRST = -1
IN_A_PLACE, NOT_PLACED = 1, 0


class Pipe:
    """A pipe that carries one number at a time."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()

    def say(self, number: int) -> None:
        os.write(self.into, WORD.pack(number))

    def hear(self) -> int | None:
        """Return the next number, or None if no writer is left."""
        said = os.read(self.out, WORD.size)
        return WORD.unpack(said)[0] if len(said) == WORD.size else None

    def says_something(self) -> bool:
        return bool(select.select([self.out], [], [], 0)[0])


class Episode:
    """A forked supervisor that waits for its episode.

    It is connected by pipes instead of sockets: /proc/net would show sockets to the code of another episode, and the
    sockets' numbers would show how old they are.
    """

    def __init__(self, supervise: Supervise, ended: Pipe, held: Iterable[int]) -> None:
        """Fork the supervisor; `held` lists the keeper's descriptors of other episodes."""
        self.start, self.placed = Pipe(), Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd in (*held, self.start.into, self.placed.out):
                    os.close(fd)
                supervise(self.start, self.placed, ended)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(SANDBOX_KILLED)
        os.close(self.start.out)
        os.close(self.placed.into)

    def is_next(self) -> None:
        """Let the supervisor listen for the end of the previous episode; only one supervisor may listen at a time."""
        with suppress(BrokenPipeError):  # If the supervisor has ended, its exit code will show that.
            self.start.say(0)

    def begin(self) -> list[int]:
        """Let the supervisor answer the host, as no earlier episode is alive.

        Returns a list with a descriptor of the supervisor's mount namespace; the list is empty if it has none.
        """
        place: list[int] = []
        try:
            if self.placed.hear() == IN_A_PLACE:
                place.append(os.open(f"{self.pid}/ns/mnt", os.O_RDONLY, dir_fd=PROC))
            self.start.say(0)
        except OSError:
            pass  # The supervisor has ended; its exit code will show that.
        os.close(self.start.into)
        os.close(self.placed.out)
        return place

    def has_ended(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0


def keep(arena: Arena | None, supervise: Supervise) -> NoReturn:
    """Run one supervisor after the other; exit as soon as one ends for a reason other than the host's request.

    If each episode has its own namespaces, its supervisor already exists while the previous episode runs. When it hears
    that the previous episode has ended, it creates its namespaces. It answers the host only when the previous
    supervisor has ended, too.
    """
    ended = Pipe()
    ended.say(FIRST)
    episode = Episode(supervise, ended, [])
    episode.is_next()
    left: list[int] = []
    while True:
        # The next supervisor is forked before any code runs, so that no code is in its way and every episode starts
        # with the same processes.
        ours = [*left, episode.start.into, episode.placed.out]
        spare = None if arena is None else Episode(supervise, ended, ours)
        place = episode.begin()
        for fd in left:
            os.close(fd)  # Frees the last episode's folders, which may take long; the next one has begun by now.
        left = place
        if spare is not None:
            spare.is_next()
        code = os.waitstatus_to_exitcode(os.waitpid(episode.pid, 0)[1])
        if code != RESET:
            if arena is None:
                kill_all_but(set())
            os._exit(code if code == 0 else SANDBOX_KILLED)
        if spare is None or spare.has_ended():
            if not ended.says_something():
                os._exit(SANDBOX_KILLED)
            spare = Episode(supervise, ended, left)
            spare.is_next()
        episode = spare
