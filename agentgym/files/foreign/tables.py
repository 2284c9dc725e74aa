"""Requirements for the tables of an untrusted database: plain tables with known columns, keys and indexes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Query: TypeAlias = Callable[[str], tuple[list[str], list[Any]]]
"""Runs a statement and returns its column names and rows."""
FUNCTIONS = ("json_", "pragma_")
"""Prefixes of the names of SQLite's table-valued functions, which a table of the same name would hide."""
REFUSED = "ask for an unchanged copy of the file that its run wrote"
"""What to do about a database with unexpected tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The columns to read from a table, and the keys and indexes that find its rows without a full scan."""

    columns: Collection[str]
    key: Sequence[str] = ()
    """Columns of its primary key, in order."""
    indexes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns of each index, in order, by the index's name."""


def wrong_with(wanted: Mapping[str, Table], query: Query, schema: Collection[Sequence[Any]]) -> str | None:
    """Return why these tables can't be read, or None if they can.

    Args:
        wanted: The expected tables by name. Other tables are ignored, except virtual ones and those whose names start
            with a prefix in `FUNCTIONS`: they make the database unreadable.
        query: Runs a statement. Only PRAGMA statements are run, which no table of the database can impersonate.
        schema: The type, name and root page of everything in the database.
    """
    for kind, name, page in schema:
        if kind == "table" and not page and name not in wanted:
            return f"it has a virtual table, {name!r:.80}; {REFUSED}"
        if kind != "index" and str(name).lower().startswith(FUNCTIONS):
            return f"its {kind!s:.20} {name!r:.80} hides a function of SQLite; {REFUSED}"
    for name, table in wanted.items():
        of = [(kind, page) for kind, each, page in schema if str(each).lower() == name and kind != "index"]
        if len(of) != 1 or of[0][0] != "table" or not of[0][1]:
            return f"it has no table {name}, or a view in its place; {REFUSED}"
        if why := _wrong_columns(name, table, query) or _wrong_indexes(name, table, query):
            return f"its table {name} {why}; {REFUSED}"
    return None


def _wrong_columns(name: str, table: Table, query: Query) -> str | None:
    found = _named(query(f'PRAGMA main.table_xinfo("{name}")'))
    for row in found:
        if row["hidden"]:
            return f"computes its column {row['name']:.80}"
    there = {row["name"] for row in found}
    for column in table.columns:
        if column not in there:
            return f"has no column {column}"
    key = [row["name"] for row in sorted(found, key=lambda row: row["pk"]) if row["pk"]]
    return (
        None if key == [*table.key] else f"has the key ({', '.join(map(str, key)):.80}) instead of {_listed(table.key)}"
    )


def _wrong_indexes(name: str, table: Table, query: Query) -> str | None:
    there = {row["name"] for row in _named(query(f'PRAGMA main.index_list("{name}")'))}
    for index, columns in table.indexes.items():
        found = _named(query(f'PRAGMA main.index_xinfo("{index}")')) if index in there else []
        if [(row["name"], row["coll"]) for row in found if row["key"]] != [(column, "BINARY") for column in columns]:
            return f"has no index {index} on {_listed(columns)}"
    return None


def _listed(columns: Sequence[str]) -> str:
    return f"({', '.join(columns)})"


def _named(answer: tuple[list[str], list[Any]]) -> list[dict[str, Any]]:
    names, rows = answer
    return [dict(zip(names, row, strict=True)) for row in rows]
