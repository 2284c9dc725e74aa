"""Nim: take turns with an opponent removing counters from heaps; whoever takes the last one wins."""

import random
import re
from functools import reduce
from operator import xor
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.engines.scripted import Reply, ReplyPolicy, call
from agentgym.environments import GameTask, IllegalMove

NAMES = "ABCDEF"


def winning_take(heaps: list[int]) -> tuple[int, int] | None:
    """Return the heap and the number of counters of a winning move.

    Returns None if every move loses against a perfect player. A move wins if it leaves heaps whose exclusive or is 0
    (Bouton, 1901).
    """
    rest = reduce(xor, heaps)
    return next(((i, heap - (heap ^ rest)) for i, heap in enumerate(heaps) if heap ^ rest < heap), None)


@ag.register("nim")
class Nim(ag.Game):
    """Reward 1 for a win, -1 for a loss or a game that the model doesn't finish."""

    rules = (
        "You play Nim against an opponent. Each move takes one or more counters from one heap; whoever takes the last "
        "counter of all wins. The move `A 2` takes two counters from heap A."
    )
    forfeit = -1.0
    limits = ag.Limits(turns=30, seconds=120)
    heaps = ag.Parameter(3, Annotated[int, Field(ge=1, le=len(NAMES))], doc="Number of heaps.")
    largest = ag.Parameter(5, Annotated[int, Field(ge=1, le=20)], doc="Largest number of counters in a heap.")
    skill = ag.Parameter(
        0.5, Annotated[float, Field(ge=0, le=1)], doc="Share of the opponent's moves that are perfect."
    )

    @classmethod
    def oracle(cls, task: GameTask) -> ReplyPolicy:
        """Return a perfect player, which wins every game that starts in its favor, and may win others by luck."""

        def reply(text: str) -> Reply:
            heaps = [int(held) for held in re.findall(r"[A-F]: (\d+)", re.findall(r"A: .*", text)[-1])]
            heap, taken = winning_take(heaps) or next((i, 1) for i, held in enumerate(heaps) if held)
            return call("move", action=f"{NAMES[heap]} {taken}")

        return reply

    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        self.counters = [rng.randint(1, self.largest) for _ in range(self.heaps)]
        self.turn = 0

    def play(self, action: str, player: int) -> None:
        said = re.fullmatch(r"\s*([A-Za-z])\s+(\d{1,3})\s*", action)
        if said is None:
            raise IllegalMove(f"{action!r:.40} is no move; write a heap and a number, as in `A 2`")
        heap, taken = NAMES.find(said[1].upper()), int(said[2])
        held = self.counters[heap] if 0 <= heap < len(self.counters) else 0
        if not 1 <= taken <= held:
            raise IllegalMove(f"heap {said[1].upper()} has {held} counters; take at least one of those that there are")
        self.counters[heap] -= taken
        self.turn = 1 - self.turn

    def observe(self, player: int) -> str:
        return ", ".join(f"{NAMES[i]}: {held}" for i, held in enumerate(self.counters))

    def to_move(self) -> int | None:
        return self.turn if any(self.counters) else None

    def returns(self) -> list[float]:
        return [
            -1.0 if self.turn == player else 1.0 for player in range(2)
        ]  # The player to move next didn't take the last counter.

    def opponent(self, observation: str, rng: random.Random) -> str:
        """Play perfectly with probability `skill`, and at random otherwise."""
        perfect = winning_take(self.counters) if rng.random() < self.skill else None
        heap, taken = perfect or self._any_take(rng)
        return f"{NAMES[heap]} {taken}"

    def _any_take(self, rng: random.Random) -> tuple[int, int]:
        heap = rng.choice([i for i, held in enumerate(self.counters) if held])
        return heap, rng.randint(1, self.counters[heap])
