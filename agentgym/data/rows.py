"""Rows of a data set as tasks. Each row becomes a task when it is accessed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, overload

from pydantic import ValidationError

from agentgym.config_fields import nearest
from agentgym.data.row_source import RowSource, row_source, without_nones
from agentgym.types.task import Task

TaskT = TypeVar("TaskT", bound=Task)
Column: TypeAlias = str | Callable[[Mapping[str, Any]], Any]
"""A column's name, or a function that computes the value from a row."""


class Rows(Sequence[TaskT], Generic[TaskT]):
    """A data set as a sequence of tasks. A task is created when it is accessed, and the data set stays on disk.

    Columns that match no field are ignored. A slice is a Rows, too, and keeps its row numbers.

    Args:
        data: A list of dicts, a `datasets.Dataset` (one split), an Arrow table, a pandas or polars frame, or anything
            else whose `[index]` returns a dict.
        task_type: The class of the tasks.
        id: The column for the field `id`, or a function of the row. None uses the row number.
        prompt: The column for the field `prompt`, or a function of the row.
        columns: The columns of other fields, by field name, needed only if a column's name differs from its field's.
            Each may be a name or a function of the row.

    Raises:
        ValueError: If the data lacks a column, or the task type lacks a field. If the task type rejects a row, the
            error is raised when that row is accessed. Its message has the row's number and the field.
    """

    def __init__(
        self,
        data: Any,
        task_type: type[TaskT],
        *,
        id: Column | None = "id",
        prompt: Column = "prompt",
        columns: Mapping[str, Column] = MappingProxyType({}),
    ) -> None:
        if not (isinstance(task_type, type) and issubclass(task_type, Task)):
            raise ValueError(f"task_type: must be a subclass of ag.Task, got {task_type!r:.80}")
        source = row_source(data)
        self._source, self._type, self._numbered = source, task_type, id is None
        self._columns = _chosen(source, task_type, columns, {"id": id, "prompt": prompt})
        self._indices = range(source.count)

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        return f"Rows({len(self)} of {self._source.count} rows, {self._type.__name__})"

    @overload
    def __getitem__(self, index: int) -> TaskT: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows[TaskT]": ...
    def __getitem__(self, index: int | slice) -> "TaskT | Rows[TaskT]":
        if isinstance(index, slice):
            part = object.__new__(type(self))
            part.__dict__ = self.__dict__ | {"_indices": self._indices[index]}
            return part
        return self._task(self._indices[index])

    def _task(self, number: int) -> TaskT:
        row = self._source.read(number)
        fields = dict(self._fields(row, number))
        if self._numbered:
            fields["id"] = number
        with naming_row(number):
            return self._type.model_validate(fields)

    def _fields(self, row: Mapping[str, Any], number: int) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each field for which the row has a value; other fields keep their defaults."""
        for name, column in self._columns.items():
            if not isinstance(column, str):
                yield name, _made(column, row, number, name)
            elif column in row and not (self._source.filled and row[column] is None):
                # The validation of messages removes Arrow's Nones itself, except in a call's arguments, where they may
                # be meant.
                filled = self._source.filled and name != "prompt"
                yield name, without_nones(row[column]) if filled else row[column]


@contextmanager
def naming_row(number: int, missing: str = "") -> Iterator[None]:
    """Turn a row's error in the `with` block into a one-line ValueError with the row's number and the field.

    Args:
        number: The row's number.
        missing: The end of the message if the row itself lacks a required field: what to do about it.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        advice = missing if first["type"] == "missing" and len(first["loc"]) == 1 else ""
        raise ValueError(f"data: row {number}: {where}: {first['msg']}, got {first['input']!r:.80}{advice}") from error
    except ValueError as error:
        raise ValueError(f"data: row {number}: {error}") from error


def _chosen(
    source: RowSource, kind: type[Task], columns: Mapping[str, Column], named: Mapping[str, Column | None]
) -> dict[str, Column]:
    """Return the column of each field: the given one, otherwise the one with the field's name.

    `named` contains the columns of `id` and `prompt`, and `columns` those of other fields, by field name. If the
    column of `id` is None, the result doesn't contain `id`.
    """
    for name in columns:
        if name in named:
            raise ValueError(f"columns: {name!r} has its own argument; write {name}=...")
        if name not in kind.model_fields:
            raise ValueError(f"columns: {kind.__name__} has no field {name!r}; {nearest(name, kind.model_fields)}")
    alike: dict[str, Column] = {name: name for name in kind.model_fields if name in source.columns}
    given = {name: column for name, column in {**named, **columns}.items() if column is not None}
    chosen = {name: column for name, column in (alike | given).items() if name != "id" or named["id"] is not None}
    for name, column in given.items():
        if source.count and isinstance(column, str) and column not in source.columns:
            how = "id=None numbers the rows" if name == "id" else "a function of the row works, too"
            raise ValueError(f"{name}: the data has no column {column!r}; {nearest(column, source.columns)}; {how}")
    lacking = [
        name
        for name, field in kind.model_fields.items()
        if source.count and field.is_required() and name not in chosen and name != "id"
    ]
    if lacking:
        raise ValueError(
            f"columns: no column for {kind.__name__}.{lacking[0]}; pass columns={{{lacking[0]!r}: ...}} with one of "
            f"{', '.join(source.columns)}"
        )
    return chosen


def _made(column: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any], number: int, name: str) -> Any:
    try:
        return column(row)
    except Exception as error:
        raise ValueError(f"data: row {number}: {name}: the function raised {type(error).__name__}: {error}") from error
