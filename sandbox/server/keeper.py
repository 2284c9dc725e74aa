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
    """A supervisor that was forked into a place of its own, where there is an arena, and waits for its episode."""

    def __init__(
        self, arena: Arena | None, supervise: Callable[[Pipe, Pipe], NoReturn], ended: Pipe, left: list[int]
    ) -> None:
        self.start, ready = Pipe(), Pipe()
        others = left
        if arena is not None:
            others = [arena.home, *left]
            arena.enter()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd in (*others, self.start.into, ready.out):
                    os.close(fd)
                ready.say(0)
                os.close(ready.into)
                supervise(self.start, ended)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(BOX_KILLED)
        os.close(ready.into)
        os.close(self.start.out)
        ready.hear()  # It holds no descriptor of an earlier place: what is closed here ends that.
        os.close(ready.out)
        self.places = [] if arena is None else [arena.leave()]


def keep(arena: Arena | None, supervise: Callable[[Pipe, Pipe], NoReturn]) -> NoReturn:
    """Have one supervisor after the other; end as soon as one ends otherwise than by the host's will."""
    ended, word = Pipe(), FIRST
    left: list[int] = []
    while True:
        episode = Episode(arena, supervise, ended, left)
        episode.start.say(word)
        for place in left:
            os.close(place)  # Here and now, while the next episode begins: it may have held many files.
        code = os.waitstatus_to_exitcode(os.waitpid(episode.pid, 0)[1])
        os.close(episode.start.into)
        left = episode.places
        if code != RESET or not ended.says_something():
            if arena is None:
                kill_all_but(set())
            os._exit(code if code == 0 else BOX_KILLED)
        said = ended.hear()
        assert said is not None
        word = said
