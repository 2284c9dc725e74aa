"""The keeper of a box: its first process, which holds the wire, never reads it, and makes the place of each episode.

Nothing of any episode passes through it, so that what it forks finds nothing of an earlier one.
"""

from __future__ import annotations

import os
import select
import struct
import sys

from .limits import BOX_KILLED, RESET
from .process_tree import kill_all_but

TYPE_CHECKING = False  # Importing typing would cost each new box some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from .arena import Arena

WORD = struct.Struct("q")
"""The number of the call that an episode begins with: the reset before it, or FIRST."""
FIRST = -1


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
    """A supervisor that was forked into a place of its own, where there is an arena, and waits for its episode.

    `others` are descriptors of other episodes, which it must not hold: a place ends when nobody holds it.
    """

    def __init__(
        self, arena: Arena | None, supervise: Callable[[Pipe, Pipe, Pipe], NoReturn], ended: Pipe, others: list[int]
    ) -> None:
        self.start, self.ready = Pipe(), Pipe()
        if arena is not None:
            others = [arena.home, *others]
            arena.enter()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd in (*others, self.start.into, self.ready.out):
                    os.close(fd)
                supervise(self.start, self.ready, ended)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(BOX_KILLED)
        os.close(self.ready.into)
        os.close(self.start.out)
        self.places = [] if arena is None else [arena.leave()]

    def is_ready(self) -> bool:
        """Wait until it can begin; False where it has ended instead."""
        ready = self.ready.hear() is not None and not os.waitpid(self.pid, os.WNOHANG)[0]
        os.close(self.ready.out)
        return ready

    def end(self) -> None:
        """End what is left of one that is not ready; no other one is there."""
        os.close(self.start.into)
        self.end_place()
        while True:
            try:
                os.waitpid(-1, 0)  # What its supervisor had started ends with it, and is ours to collect.
            except ChildProcessError:
                return

    def end_place(self) -> None:
        for place in self.places:
            os.close(place)


def keep(arena: Arena | None, supervise: Callable[[Pipe, Pipe, Pipe], NoReturn]) -> NoReturn:
    """Have one supervisor after the other; end as soon as one ends otherwise than by the host's will.

    Where episodes have places of their own, the next one's is made while an episode runs, out of that one's reach.
    """
    ended, word = Pipe(), FIRST
    next_one = Episode(arena, supervise, ended, [])
    before: Episode | None = None
    while True:
        episode = next_one
        if not episode.is_ready():
            episode.end()
            episode = Episode(arena, supervise, ended, [] if before is None else before.places)
            if not episode.is_ready():  # Nothing is in its way any more.
                os._exit(BOX_KILLED)
        episode.start.say(word)
        if before is not None:
            before.end_place()  # Here and now, while the next episode begins: it may have held many files.
        if arena is not None:
            next_one = Episode(arena, supervise, ended, [episode.start.into, *episode.places])
        code = os.waitstatus_to_exitcode(os.waitpid(episode.pid, 0)[1])
        os.close(episode.start.into)
        if code != RESET or not ended.says_something():
            if arena is None:
                kill_all_but(set())
            os._exit(code if code == 0 else BOX_KILLED)
        if arena is None:
            next_one = Episode(arena, supervise, ended, [])
        said = ended.hear()
        assert said is not None
        word, before = said, episode
