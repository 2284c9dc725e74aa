"""Tasks from rows: a data set's dicts become the env's own tasks on access."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, overload

from agentgym.data.chosen import Chosen
from agentgym.data.endless import Endless, Procedural
from agentgym.data.row_source import is_table, rows_of_columns
from agentgym.data.rows import Rows, naming_row
from agentgym.types.task import Task


def task_type(env: type) -> type[Task]:
    """Return the task type that an env class is written for: MyTask for `class MyEnv(ag.ToolEnv[MyTask])`."""
    for base in env.__mro__:
        for written in vars(base).get("__orig_bases__", ()):
            for argument in get_args(written):
                if isinstance(argument, type) and issubclass(argument, Task):
                    return argument
    return Task


def as_task(env: type, row: Any) -> Any:
    """Return a dict as the env's task, and a task unchanged.

    Raises:
        ValidationError: If the task type rejects a dict; the error names the field.
        ValueError: If `row` is neither a task nor a dict.
    """
    if isinstance(row, Task):
        return row
    if isinstance(row, Mapping):
        return task_type(env).model_validate(dict(row))
    if not hasattr(row, "id"):
        kind = task_type(env).__name__
        raise ValueError(f"task: {env.__name__} needs a {kind} or a dict of its fields, got {row!r:.80}")
    return row


def split_tasks(env: Any, split: str) -> Any:
    """Return the tasks of an env class's split, as `as_tasks` returns them.

    Raises:
        ValueError: If it isn't a sequence of tasks; the message names the class's `tasks`.
    """
    return as_tasks(env, env.tasks(split), f"{env.__name__}.tasks({split!r})")


def first_tasks(tasks: Any, most: int) -> list[Any]:
    """Return the first tasks of a sequence that may not support slices."""
    return [tasks[place] for place in range(min(most, len(tasks)))]


def as_tasks(env: type, tasks: Any, named: str = "tasks") -> Any:
    """Return a sequence of dicts as tasks that are validated on access, and a sequence of tasks unchanged.

    Columns of equal length that include all required fields, such as a slice of a `datasets.Dataset`, count as rows,
    too.

    Args:
        env: The env class.
        tasks: The sequence.
        named: How messages name the sequence.

    Raises:
        ValueError: If it is a single task, a mapping of splits, a table, or not a sequence of tasks; the message begins
            with `named`.
    """
    kind = task_type(env)
    if isinstance(tasks, Task):
        raise ValueError(f"{named}: pass a list of tasks, got the single task {tasks.id!r}")
    if isinstance(tasks, Mapping):
        required = [name for name, of in kind.model_fields.items() if of.is_required()]
        if (rows := rows_of_columns(tasks, required)) is None:
            keys = ", ".join(map(str, tasks))
            raise ValueError(f"{named}: give one sequence of tasks, got a mapping with the keys {keys}")
        return TaskRows(env, rows, range(len(rows)))
    if isinstance(tasks, Endless):
        return tasks.mapped(lambda row: as_task(env, row))
    if is_table(tasks):
        got = type(tasks).__name__
        raise ValueError(
            f"{named}: got a {got}, whose [index] does not return a row; write ag.Rows(table, {kind.__name__})"
        )
    if isinstance(tasks, str | bytes) or not (hasattr(tasks, "__getitem__") and hasattr(tasks, "__len__")):
        raise ValueError(
            f"{named}: pass a sequence of tasks, such as a list, got {tasks!r:.60}; put list(...) around a "
            "generator, or use ag.Endless for an endless one"
        )
    return TaskRows(env, tasks, range(len(tasks))) if _has_rows(tasks) else tasks


def _has_rows(tasks: Any) -> bool:
    """Return whether tasks must be made from the items.

    In a list or tuple, that is so if any item isn't a task, and in another sequence, if its first item is a dict.
    """
    if not len(tasks):
        return False
    if isinstance(tasks, list | tuple):
        return not all(isinstance(row, Task) for row in tasks)
    return isinstance(tasks[0], Mapping)


class TaskRows(Sequence[Any]):
    """A data set as a sequence of tasks; the data set only needs `[index]` with integers."""

    def __init__(self, env: type, rows: Any, indices: range) -> None:
        self.env, self.rows, self.indices = env, rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "TaskRows": ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return TaskRows(self.env, self.rows, self.indices[index])
        number = self.indices[index]
        renamed = f"; if other columns hold the fields, use ag.Rows(data, {task_type(self.env).__name__}, ...)"
        with naming_row(number, missing=renamed):
            return as_task(self.env, self.rows[number])


def is_data(tasks: Any) -> bool:
    """Return whether the tasks are rows of a data set, not tasks made from an index.

    Equal rows of a data set are copies of each other, but equal tasks made from an index may be a coincidence.
    """
    return isinstance(tasks, list | tuple | Rows | TaskRows) or (isinstance(tasks, Chosen) and is_data(tasks.tasks))


COMPARED = 64
"""Number of tasks of a split that are compared with the other split, if tasks are made from an index."""
SEARCHED = 10_000
"""Maximum number of indices that are tried in the search for indices that both splits have."""


def compared(train: Any, test: Any) -> tuple[list[Any], list[Any]]:
    """Return the tasks of each split that are compared to find out whether the splits share any.

    For a data set, these are all rows. For tasks made from an index, these are the first ones, and some whose index is
    in both splits.
    """
    found = first_tasks(train, _looked_at(train)), first_tasks(test, _looked_at(test))
    if isinstance(train, Procedural) and isinstance(test, Procedural):
        seen = {*train.indices[:COMPARED]} & {*test.indices[:COMPARED]}
        for place in (place for place in _in_both(train.indices, test.indices) if place not in seen):
            found[0].append(train.make(place))
            found[1].append(test.make(place))
    return found


def shared_ids(train: Sequence[Task], test: Sequence[Task], *, listed: bool) -> str | None:
    """Return a phrase that names the ids that the tasks have in common, or None if there are none.

    Args:
        train: Tasks to train on.
        test: Held-out tasks.
        listed: Whether these are all the tasks, not just the compared ones.
    """
    ids = sorted({task.id for task in train} & {task.id for task in test})
    if not ids:
        return None
    some = "" if listed else f" among the {len({task.id for task in test})} test tasks that were compared"
    return f"train and test share {len(ids)} {'id' if len(ids) == 1 else 'ids'}{some} ({', '.join(map(repr, ids[:3]))})"


def _looked_at(tasks: Any) -> int:
    return len(tasks) if is_data(tasks) else min(len(tasks), COMPARED)


def _in_both(one: range, other: range) -> list[int]:
    """Return the first numbers that are in both ranges: at most COMPARED, found among SEARCHED candidates."""
    if not (one and other):
        return []
    ends = [sorted((each[0], each[-1])) for each in (one, other)]
    first, last = max(low for low, _ in ends), min(high for _, high in ends)
    return [place for place in range(first, last + 1)[:SEARCHED] if place in one and place in other][:COMPARED]
