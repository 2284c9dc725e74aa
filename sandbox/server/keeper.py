"""The keeper of a sandbox: its first process, which holds the wire, never reads it, and has a supervisor for each
episode.

Nothing of any episode passes through it, so that what it forks finds nothing of an earlier one.
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
    """Takes the pipes by which it hears that it may answer, says that it is in its place, and says that it ends."""

WORD = struct.Struct("q")
"""The number of the call that an episode begins with: the reset before it, or FIRST."""
FIRST = -1
IN_A_PLACE, NOT_PLACED = 1, 0


class Pipe:
    """A pipe that carries one number at a time."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()

    def say(self, number: int) -> None:
        os.write(self.into, WORD.pack(number))

    def hear(self) -> int | None:
        """The next number; None where nobody is left who could say one."""
        said = os.read(self.out, WORD.size)
        return WORD.unpack(said)[0] if len(said) == WORD.size else None

    def says_something(self) -> bool:
        return bool(select.select([self.out], [], [], 0)[0])


class Episode:
    """A supervisor that was forked, and waits for its episode.

    By pipes: /proc/net would tell the code of another episode of sockets, and their numbers how old they are.
    """

    def __init__(self, supervise: Supervise, ended: Pipe, held: Iterable[int]) -> None:
        """`held` is what the keeper holds of other episodes."""
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
        """Have it listen for the end of the episode before its own, for which no other one listens then."""
        with suppress(BrokenPipeError):  # It has ended, which is looked at when its turn comes.
            self.start.say(0)

    def begin(self) -> list[int]:
        """Have it answer the host, because nothing of an earlier episode lives; what holds its place, if it has one."""
        place: list[int] = []
        try:
            if self.placed.hear() == IN_A_PLACE:
                place.append(os.open(f"{self.pid}/ns/mnt", os.O_RDONLY, dir_fd=PROC))
            self.start.say(0)
        except OSError:
            pass  # It has ended, which its exit says.
        os.close(self.start.into)
        os.close(self.placed.out)
        return place

    def has_ended(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0


def keep(arena: Arena | None, supervise: Supervise) -> NoReturn:
    """Have one supervisor after the other; end as soon as one ends otherwise than by the host's will.

    Where each has a place of its own, the next one is there while an episode runs. It makes its place when it hears
    that the episode before it has ended, and answers when that one's supervisor has ended too.
    """
    ended = Pipe()
    ended.say(FIRST)
    episode = Episode(supervise, ended, [])
    episode.is_next()
    left: list[int] = []
    while True:
        # Before any code runs: so that none is in its way, and every episode begins with the same processes.
        ours = [*left, episode.start.into, episode.placed.out]
        spare = None if arena is None else Episode(supervise, ended, ours)
        place = episode.begin()
        for fd in left:
            os.close(fd)  # Here and now, while the next episode begins: it may have held many files.
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
