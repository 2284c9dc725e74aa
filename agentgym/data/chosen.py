"""Subsets of a task sequence: the tasks that a predicate keeps, and splits that can't overlap."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import overload

from agentgym.data.content import content, key_text
from agentgym.data.endless import Endless, TaskT
from agentgym.types.task import Task

_LOG = logging.getLogger(__name__)


class Chosen(Sequence[TaskT]):
    """Some of a sequence's tasks, in the sequence's order. A task is created when it is accessed."""

    def __init__(self, tasks: Sequence[TaskT], numbers: Sequence[int]) -> None:
        self.tasks, self.numbers = tasks, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"Chosen({len(self)} of {len(self.tasks)})"

    @property
    def left_out(self) -> int:
        """Number of tasks of the sequence that were left out."""
        return len(self.tasks) - len(self)

    @overload
    def __getitem__(self, index: int) -> TaskT: ...
    @overload
    def __getitem__(self, index: slice) -> "Chosen[TaskT]": ...
    def __getitem__(self, index: int | slice) -> "TaskT | Chosen[TaskT]":
        if isinstance(index, slice):
            return Chosen(self.tasks, self.numbers[index])
        return self.tasks[self.numbers[index]]


class _Where(Chosen[TaskT]):
    """The tasks that a predicate keeps. The predicate runs on all tasks at the first access."""

    def __init__(self, tasks: Sequence[TaskT], keep: Callable[[TaskT], bool]) -> None:
        self.tasks, self._keep = tasks, keep

    @cached_property
    def numbers(self) -> Sequence[int]:  # type: ignore[override]  # computed on first access
        """The indices of the tasks that are kept."""
        found = [number for number in range(len(self.tasks)) if self._keep(self.tasks[number])]
        if len(self.tasks) and not found:
            raise ValueError(f"where: none of {len(self.tasks)} tasks is kept; check the predicate")
        _LOG.info("where: %d of %d tasks are kept", len(found), len(self.tasks))
        return found


@overload
def where(tasks: Endless[TaskT], keep: Callable[[TaskT], bool]) -> Endless[TaskT]: ...  # type: ignore[overload-overlap]
@overload
def where(tasks: Sequence[TaskT], keep: Callable[[TaskT], bool]) -> Chosen[TaskT]: ...
def where(tasks: Sequence[TaskT], keep: Callable[[TaskT], bool]) -> Sequence[TaskT]:
    """Return the tasks for which `keep` is true.

    All tasks are checked at the first access. In the result, `len` counts the tasks that are kept, and `left_out`
    counts the others. For an `Endless`, the result is an Endless, too.

    Args:
        tasks: The tasks.
        keep: Returns whether to keep a task.

    Raises:
        ValueError: When the tasks are accessed, if none is kept.
    """
    return tasks.where(keep) if isinstance(tasks, Endless) else _Where(tasks, keep)


def split(
    tasks: Sequence[TaskT], *, seed: int = 0, by: Callable[[TaskT], object] | None = None, **shares: float
) -> dict[str, Chosen[TaskT]]:
    """Split tasks into parts that can't overlap: `split(tasks, train=0.9, test=0.1)`.

    A task's part depends only on the seed and on the task's content, which is all of its fields except the id. Tasks
    that differ only in their ids are therefore in the same part. When a data set grows, no task moves to another
    part. Because each task is assigned independently of the others, the shares are only approximate.

    Args:
        tasks: The tasks, which must not be endless.
        seed: The seed of the split. A different seed gives a different split.
        by: A function of a task whose value decides the part instead of the content. If it returns a task's
            repository, all tasks of one repository are in the same part.
        shares: The share of each part by its name. They must add up to 1.

    Returns:
        The tasks of each part, by its name.

    Raises:
        ValueError: If a task or a value of `by` has no text that is the same in every process, for example because a
            field is a function. Also if an id or a content is in two parts, if a part has no task, or if the shares
            are not above 0 or don't add up to 1.
    """
    if len(shares) < 2 or min(shares.values()) <= 0 or not math.isclose(sum(shares.values()), 1.0):
        given = ", ".join(f"{name}={share}" for name, share in shares.items()) or "none"
        raise ValueError(f"shares: pass two or more that add up to 1, such as train=0.9, test=0.1; got {given}")
    if isinstance(tasks, Endless):
        raise ValueError("tasks: endless tasks cannot be split; split the data that they are generated from")
    numbers: dict[str, list[int]] = {name: [] for name in shares}
    seen = _Seen()
    for number in range(len(tasks)):
        task = tasks[number]
        if not _is_task(task):
            raise ValueError(
                f"tasks: number {number} is not a task but {task!r:.60}; to turn rows into tasks, "
                "write ag.Rows(data, MyTask)"
            )
        part = _part(shares, seed, content(task) if by is None else key_text(by(task)))
        numbers[part].append(number)
        if (wrong := seen.add(task, part)) is not None:
            raise ValueError(f"tasks: {wrong}")
    for name, found in numbers.items():
        if not found:
            raise ValueError(f"{name}: this part got none of the {len(tasks)} tasks; use another seed, or more tasks")
    return {name: Chosen(tasks, found) for name, found in numbers.items()}


def overlap(splits: Mapping[str, Sequence[Task]]) -> str | None:
    """Return a phrase that names a task that is in two splits, or None if there is no such task.

    Two tasks count as the same if they have the same id, or if all of their other fields are equal.
    """
    seen = _Seen()
    for name, tasks in splits.items():
        for number in range(len(tasks)):
            if (wrong := seen.add(tasks[number], name)) is not None:
                return wrong
    return None


def refuse_twice(tasks: Sequence[Task], name: str) -> None:
    """Raise ValueError if two tasks have the same id.

    Such tasks would form one group, and a store would treat them as one task. `name` says in the message whose tasks
    these are.
    """
    seen: dict[str, int] = {}
    for number in range(len(tasks)):
        task = tasks[number]
        first = seen.setdefault(task.id, number)
        if first != number:
            raise ValueError(
                f"env: {name} has the id {task.id!r} twice, as number {first} and as number {number}; give each task "
                "a unique id, such as its number: ag.Rows(data, MyTask, id=None)"
            )


class _Seen:
    """The ids and contents of the tasks of several splits."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._contents: dict[bytes, tuple[str, str]] = {}

    def add(self, task: Task, name: str) -> str | None:
        """Record a task of the split `name`.

        Returns:
            What is wrong if another split has the same task, otherwise None.
        """
        other = self._ids.setdefault(task.id, name)
        if other != name:
            return f"the id {task.id!r} is in {other!r} and in {name!r}; a held-out task must not be trained on"
        other, known = self._contents.setdefault(_digest(content(task)), (name, task.id))
        if other != name:
            return f"{known!r} in {other!r} and {task.id!r} in {name!r} are equal except for their ids"
        return None


def _is_task(row: object) -> bool:
    return isinstance(row, Task)


def _part(shares: Mapping[str, float], seed: int, key: str) -> str:
    """Return the part for a key.

    The key is hashed to a number from 0 to 1. The parts divide this range according to their shares.
    """
    place = int.from_bytes(_digest(f"{seed} {key}")[:8]) / 2**64
    end = 0.0
    for name, share in shares.items():
        end += share
        if place < end:
            return name
    return name


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
