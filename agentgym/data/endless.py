"""Tasks that a generator produces without end."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, overload

from agentgym.types.task import Task

LEFT_OUT_AT_MOST = 10_000
"""Number of consecutive tasks that a filter may leave out before it raises an error."""
TaskT = TypeVar("TaskT", bound=Task)


class Endless(Sequence[TaskT]):
    """The tasks that `generate(seed)` yields, in order and without end.

    The same seed must give the same tasks. A run passes a seed derived from its own. Each process of the run takes
    its share of the stream. A resumed run generates the tasks again up to the point where it stopped, and continues
    from there. Outside of a run the seed is `seed`. `tasks[:n]` are the first n tasks. `len` returns `sys.maxsize`,
    because the true length is infinite.

    Args:
        generate: A function of a seed that yields tasks forever.
        seed: The seed outside of a run.

    Raises:
        ValueError: If the generator ends. The message says after how many tasks.
    """

    def __init__(self, generate: Callable[[int], Iterator[TaskT]], *, seed: int = 0) -> None:
        if not callable(generate):
            raise ValueError(f"generate: must be a function of a seed that yields tasks, got {generate!r:.80}")
        self._generate, self.seed = generate, seed
        self._coming, self._made = self.begin(seed), 0

    def begin(self, seed: int) -> Iterator[TaskT]:
        """Yield the tasks of this seed, starting with the first one.

        Args:
            seed: The seed.
        """
        made = 0
        for task in self._generate(seed):
            yield task
            made += 1
        raise ValueError(
            f"tasks: the generator ended after {made} tasks, but Endless needs one that never ends; make it loop"
        )

    def mapped(self, change: Callable[[TaskT], Any]) -> "Endless[Any]":
        """Return the same stream with `change` applied to each task.

        Args:
            change: A function of a task.
        """
        return Endless(lambda seed: map(change, self.begin(seed)), seed=self.seed)

    def where(self, keep: Callable[[TaskT], bool]) -> "Endless[TaskT]":
        """Return the stream of the tasks for which `keep` is true.

        The stream raises ValueError if `keep` is false for 10,000 tasks in a row.

        Args:
            keep: Returns whether to keep a task.
        """
        return Endless(lambda seed: _kept(self.begin(seed), keep), seed=self.seed)

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[TaskT]:
        return self.begin(self.seed)

    def __repr__(self) -> str:
        return f"Endless(seed={self.seed})"

    @overload
    def __getitem__(self, index: int) -> TaskT: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskT]: ...
    def __getitem__(self, index: int | slice) -> TaskT | Sequence[TaskT]:
        if isinstance(index, slice):
            return self._part(index)
        if index < 0:
            raise IndexError(f"{index}: endless tasks cannot be indexed from their end")
        if index < self._made:  # Going back restarts the generator, which is slow; tasks are mostly accessed in order.
            self._coming, self._made = self.begin(self.seed), 0
        task = next(islice(self._coming, index - self._made, None))
        self._made = index + 1
        return task

    def _part(self, part: slice) -> Sequence[TaskT]:
        start, step = part.start or 0, 1 if part.step is None else part.step
        if step == 0:
            raise ValueError(f"{part}: the step of a slice cannot be 0")
        if min(start, step, part.stop or 0) < 0:
            raise IndexError(f"{part}: endless tasks cannot be indexed from their end")
        if part.stop is not None:
            return list(islice(self, start, part.stop, step))
        return Endless(lambda seed: islice(self.begin(seed), start, None, step), seed=self.seed)


def _kept(tasks: Iterator[TaskT], keep: Callable[[TaskT], bool]) -> Iterator[TaskT]:
    left_out = 0
    for task in tasks:
        left_out = 0 if (kept := keep(task)) else left_out + 1
        if kept:
            yield task
        elif left_out == LEFT_OUT_AT_MOST:
            raise ValueError(f"where: none of {left_out} tasks in a row is kept; check the predicate")


class Procedural(Sequence[TaskT]):
    """A sequence of tasks, each created by `make(index)` when it is accessed.

    A slice is a Procedural, too, and creates no task.

    Args:
        make: Creates the task of an index. It must return the same task for the same index.
        indices: The index of each task in the sequence.
    """

    def __init__(self, make: Callable[[int], TaskT], indices: range) -> None:
        self.make, self.indices = make, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> TaskT: ...
    @overload
    def __getitem__(self, index: slice) -> "Procedural[TaskT]": ...
    def __getitem__(self, index: int | slice) -> "TaskT | Procedural[TaskT]":
        if isinstance(index, slice):
            return Procedural(self.make, self.indices[index])
        return self.make(self.indices[index])
