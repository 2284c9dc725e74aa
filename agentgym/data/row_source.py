"""One way to read rows from a list of dicts, a `datasets.Dataset`, an Arrow table or a data frame."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RowSource:
    """The rows of a data set, read one at a time. The data set isn't copied."""

    count: int
    columns: tuple[str, ...]
    """The column names: for a list, the keys of all its rows; for another sequence, those of its first row."""
    read: Callable[[int], Mapping[str, Any]]
    """Returns the row at an index from 0 to `count` - 1."""
    filled: bool
    """Whether the source fills missing values with None. Arrow does, so each row has every key that any row has."""


def is_table(data: Any) -> bool:
    """Return whether the data is an Arrow table, or a pandas or polars frame, whose `[index]` doesn't return a row."""
    return _is_pandas(data) or _is_arrow(data) or _is_polars(data)


def rows_of_columns(data: Mapping[Any, Any], needed: Collection[str]) -> list[dict[str, Any]] | None:
    """Return the rows of a dict of columns, such as a slice of a `datasets.Dataset`, or None if it isn't such a dict.

    The columns must be lists of the same length, and include those in `needed`.
    """
    if not (data.keys() >= set(needed) and all(isinstance(of, list | tuple | np.ndarray) for of in data.values())):
        return None
    if len({len(of) for of in data.values()}) != 1:
        return None
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def row_source(data: Any) -> RowSource:
    """Return a reader for the rows of `data`.

    Raises:
        ValueError: If `data` is a mapping of splits, or has no length, or has no rows by index.
    """
    if isinstance(data, Mapping):
        rows = rows_of_columns(data, ())
        if not rows or any(isinstance(value, Mapping) for value in rows[0].values()):
            raise ValueError(
                f"data: expected one sequence of rows, got a mapping with the keys {', '.join(map(str, data))}; "
                "pass one split, or a list of rows"
            )
        return RowSource(len(rows), _names(data), rows.__getitem__, True)
    if _is_pandas(data):
        return RowSource(len(data), _names(data.columns), lambda i: _plain(data.iloc[i].to_dict()), True)
    if _is_arrow(data):
        return RowSource(data.num_rows, _names(data.column_names), lambda i: data.slice(i, 1).to_pylist()[0], True)
    if _is_polars(data):
        return RowSource(data.height, _names(data.columns), lambda i: data.row(i, named=True), True)
    if isinstance(data, str | bytes) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ValueError(
            f"data: must have a length and rows by index, got {type(data).__name__}; use list(...) for a finite stream"
        )
    return _of_sequence(data)


def _of_sequence(data: Any) -> RowSource:
    """Return a reader for a sequence whose `[index]` returns rows.

    A `datasets.Dataset` is one, and also knows its columns.
    """
    if hasattr(data, "column_names"):
        return RowSource(len(data), _names(data.column_names), lambda i: data[i], True)
    looked_at = data if isinstance(data, list | tuple) else [data[0]] if len(data) else []
    for number, row in enumerate(looked_at):
        if not isinstance(row, Mapping):
            raise ValueError(f"data: a row must be a dict of columns, but row {number} is {row!r:.80}")
    return RowSource(
        len(data), _names(dict.fromkeys(key for row in looked_at for key in row)), lambda i: data[i], False
    )


def _is_pandas(data: Any) -> bool:
    return hasattr(data, "iloc") and hasattr(data, "columns")


def _is_arrow(data: Any) -> bool:
    return hasattr(data, "to_pylist") and hasattr(data, "column_names")


def _is_polars(data: Any) -> bool:
    return callable(getattr(data, "row", None)) and hasattr(data, "columns")


def _names(columns: Any) -> tuple[str, ...]:
    return tuple(map(str, columns))


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a pandas row as Python values, with None for missing values."""
    return {str(name): _plain_value(value) for name, value in row.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    missing = isinstance(value, float) and math.isnan(value)
    return None if missing or type(value).__name__ in ("NAType", "NaTType") else value


def without_nones(value: Any) -> Any:
    """Return the value without mapping keys whose value is None, at every level."""
    if isinstance(value, Mapping):
        return {key: without_nones(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_nones(inner) for inner in value]
    return value
