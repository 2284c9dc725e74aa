"""Tasks that are made from their index."""

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

from agentgym.types import Task

TaskT = TypeVar("TaskT", bound=Task)


class Procedural(Sequence[TaskT]):
    """A sequence of tasks that calls `make(index)` when a task is asked for, with each index of `indices`.

    `make` must return the same task for the same index. A slice is a Procedural, too, and makes no task.
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
