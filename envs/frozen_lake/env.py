"""Frozen lake: walk over a grid of ice with holes, from one corner to the opposite one.

A game with one player. Every grid has a path to the goal. With `slippery`, a step may go in a random direction.
"""

import random
from collections import deque
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.environments import GameTask, IllegalMove
from agentgym.testing import Reply, call

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
Place = tuple[int, int]


def make_grid(seed: int, size: int, holes: float) -> list[str]:
    """Create the grid of a seed: S is the start, G the goal, H a hole and F ice.

    The same arguments always give the same grid.
    """
    rng = random.Random(seed)
    while True:
        cells = [["H" if rng.random() < holes else "F" for _ in range(size)] for _ in range(size)]
        cells[0][0], cells[-1][-1] = "S", "G"
        grid = ["".join(row) for row in cells]
        if shortest_way(grid) is not None:
            return grid


def shortest_way(grid: list[str]) -> list[str] | None:
    """Return the steps of a shortest path to the goal, or None if there is no path."""
    ways: dict[Place, list[str]] = {(0, 0): []}
    waiting = deque(ways)
    while waiting:
        place = waiting.popleft()
        if cell(grid, place) == "G":
            return ways[place]
        for name in STEPS:
            following = step_from(place, name, len(grid))
            if following not in ways and cell(grid, following) != "H":
                ways[following] = [*ways[place], name]
                waiting.append(following)
    return None


def step_from(place: Place, name: str, size: int) -> Place:
    """Return the cell after a step; a step over the edge of the grid stays in the same cell."""
    down, right = STEPS[name]
    row, column = place[0] + down, place[1] + right
    return (row, column) if row in range(size) and column in range(size) else place


def cell(grid: list[str], place: Place) -> str:
    """Return the letter of a cell."""
    return grid[place[0]][place[1]]


@ag.register("frozen_lake")
class FrozenLake(ag.Game):
    """Reward 1 at the goal, 0 in a hole or if the walk does not end."""

    players = 1
    actions = tuple(STEPS)
    rules = (
        "You stand on a frozen lake, at P. Walk to the goal G, step by step, over the ice F. A hole H ends the walk."
    )
    limits = ag.Limits(turns=40, seconds=120)
    size = ag.Parameter(4, Annotated[int, Field(ge=2, le=12)], doc="Number of rows and columns of the grid.")
    holes = ag.Parameter(0.2, Annotated[float, Field(ge=0, le=0.5)], doc="Share of cells that are holes.")
    slippery = ag.Parameter(
        0.0, Annotated[float, Field(ge=0, lt=1)], doc="Probability that a step goes in a random direction."
    )

    @classmethod
    def oracle(cls, task: GameTask) -> list[Reply]:
        """Return the steps of a shortest path, which lead to the goal unless the lake is slippery."""
        return [call("move", action=step) for step in shortest_way(make_grid(task.seed, cls.size, cls.holes)) or ()]

    def start(self, seed: int) -> None:
        self.grid = make_grid(seed, self.size, self.holes)
        self.place: Place = (0, 0)

    def play(self, action: str, player: int) -> None:
        if self.luck.random() < self.slippery:
            action = self.luck.choice(list(STEPS))
        following = step_from(self.place, action, self.size)
        if following == self.place:
            raise IllegalMove(f"the edge is {action} of you; step elsewhere")
        self.place = following

    def observe(self, player: int) -> str:
        lake = [list(row) for row in self.grid]
        lake[self.place[0]][self.place[1]] = "P"
        said = {"G": "You are at the goal.\n", "H": "You fell into a hole.\n"}.get(cell(self.grid, self.place), "")
        return said + "\n".join("".join(row) for row in lake)

    def to_move(self) -> int | None:
        return None if cell(self.grid, self.place) in "GH" else 0

    def returns(self) -> list[float]:
        return [float(cell(self.grid, self.place) == "G")]
