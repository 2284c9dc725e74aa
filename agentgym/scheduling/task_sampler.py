"""Which tasks a run plays, in which order, which of them each process, and where to go on after a stop."""

import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Generic

from agentgym.environments.env import Env, TaskT
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_tasks


def batches(env: str | type[Env[TaskT]], prompts: int, steps: int, *, seed: int) -> Iterator[list[TaskT]]:
    """`steps` batches of `prompts` training tasks in an order of the seed.

    No task comes twice before all were seen, but for the few that were left over when they fill no whole batch.
    """
    cls = find_env(env)
    tasks = as_tasks(cls, cls.tasks("train"))
    if prompts > len(tasks):
        raise ValueError(f"prompts: {prompts} in a batch, and the env has {len(tasks)} training tasks")
    rng = random.Random(seed)
    seen: set[int] = set()
    for _ in range(steps):
        if len(seen) + prompts > len(tasks):
            seen.clear()
        indices = _draw(rng, prompts, len(tasks), seen)
        yield [tasks[index] for index in indices]


def _draw(rng: random.Random, wanted: int, count: int, seen: set[int]) -> list[int]:
    """Indices that were not seen yet; a procedural env has more of them than anyone would shuffle."""
    drawn: list[int] = []
    while len(drawn) < wanted:
        index = rng.randrange(count)
        if index not in seen:
            seen.add(index)
            drawn.append(index)
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process's scheduler stands between two batches: what another one needs to go on in its place."""

    drawn: int = 0
    """Every task of this process before this number has been drawn;"""
    unplayed: tuple[int, ...] = ()
    """and of those, these have no group that was returned or dropped."""
    batches: int = 0
    """Returned so far."""
    started: int = 0
    """Groups started since the last batch,"""
    resumed: int = 0
    """and those that it left in play."""
    tokens: int = 0
    """Sampled by the groups in play, in finished turns."""
    requests: dict[str, int] = field(default_factory=dict)
    """What became of the engine's requests since the last batch; those in flight count as dropped."""


def merge_states(places: Sequence[Place], rank: int) -> Place:
    """What a process's scheduler takes over from those of a stopped run: the first one, all that they had in play."""
    batches = max((place.batches for place in places), default=0)
    if rank:
        return Place(batches=batches)
    return Place(
        batches=batches,
        started=sum(place.started for place in places),
        resumed=sum(place.resumed for place in places),
        tokens=sum(place.tokens for place in places),
        requests=dict(sum((Counter(place.requests) for place in places), start=Counter())),
    )


class Draw(Iterator[TaskT], Generic[TaskT]):
    """One process's tasks, for ever: its share of every batch, in the order of the seed.

    With `by_id` a task is one process's alone, however often it comes round: where groups are carried over, two
    processes could otherwise play the same task for one batch. `places` are those of the processes of a run that was
    stopped, as many as they were: what they had drawn does not come again, but for what they had not played.
    """

    def __init__(
        self,
        env: str | type[Env[TaskT]],
        prompts: int,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        by_id: bool = False,
        places: Sequence[Place] = (),
    ) -> None:
        self._rank, self._world, self._by_id = rank, world, by_id
        self._all = enumerate(
            (place, task) for batch in batches(env, prompts, sys.maxsize, seed=seed) for place, task in enumerate(batch)
        )
        self._drawn = max((place.drawn for place in places), default=0)
        self._again: deque[tuple[int, TaskT]] = deque()
        for number, (place, task) in islice(self._all, self._drawn):
            before = places[self._owner(place, task, len(places))]
            if (number >= before.drawn or number in before.unplayed) and self._owner(place, task, world) == rank:
                self._again.append((number, task))
        self._numbers: list[int] = []
        """Of every task that was handed out."""

    def __next__(self) -> TaskT:
        number, task = self._again.popleft() if self._again else self._fresh()
        self._numbers.append(number)
        return task

    def _fresh(self) -> tuple[int, TaskT]:
        for number, (place, task) in self._all:
            if self._owner(place, task, self._world) == self._rank:
                self._drawn = number + 1
                return number, task
        raise StopIteration

    def _owner(self, place: int, task: TaskT, world: int) -> int:
        return (zlib.crc32(task.id.encode()) if self._by_id else place) % world

    def place(self, scheduler: Place) -> Place:
        """The scheduler's place, its tasks numbered as the run's rather than as what this has handed out."""
        unplayed = [self._numbers[number] for number in scheduler.unplayed] + [number for number, _ in self._again]
        return replace(scheduler, drawn=self._drawn, unplayed=tuple(sorted(unplayed)))
