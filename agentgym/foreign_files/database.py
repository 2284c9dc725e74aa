"""Untrusted SQLite databases: only read, and never for longer than their size explains."""

import fcntl
import json
import os
import sqlite3
import stat
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from sys import getsizeof
from typing import Any, ClassVar

from agentgym.folders.file_systems import has_locks, shared_kind
from agentgym.foreign_files.opening import MOST_BYTES, UnreadableFileError, regular_file

LOOK_EACH = 10_000
"""Steps of SQLite's machine between two checks of the limit; they take a fraction of a millisecond."""
FREE_STEPS = 20_000_000
"""Steps that every statement may take: about a second."""
STEPS_A_BYTE = 50
"""Additional steps for each byte of the file; a row of a run's store has hundreds of bytes and takes tens of steps."""
FREE_ROWS, BYTES_A_ROW = 1000, 32
"""Rows that every statement may give, and the bytes of the file that allow for each further one."""
FREE_BYTES = 1 << 20
"""Bytes by which one value may be larger than the file."""
MEMORY_A_BYTE = 16
"""Bytes of memory that all rows may take for each byte of the file: the smallest number of a byte takes 28."""
MOST_SCHEMAS = 100
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""The end of a rollback journal that names a file for SQLite to delete."""


class ForeignDatabase:
    """Reads one database without trusting it: it runs no code, and its results have limits.

    A run may write to it meanwhile. The reader writes nothing except SQLite's own shared memory beside a database in
    write-ahead mode, `NAME-shm`; it never rolls back a rollback journal.
    Raises:
        FileNotFoundError: There is no such file.
        UnreadableFileError: It, or a file that SQLite would open beside it, is not a regular file.
        sqlite3.Error: It is not a database, or another process holds it.
    """

    _sound: ClassVar[set[tuple[object, ...]]] = set()
    """Schemas that were checked and have what was wanted: most stores have the same."""

    def __init__(self, path: Path, *, within: Path | None) -> None:
        self.path = regular_file(path, within=within)
        check_beside(self.path)
        self.connection = _connected(self.path)
        self._left, self._size = 0, -1
        self._measure()
        self.connection.set_progress_handler(self._is_over, LOOK_EACH)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def rows(self, sql: str, values: Collection[object] = ()) -> tuple[list[str], list[Any]]:
        """Return the names of the columns and the rows of a statement.

        Raises:
            UnreadableFileError: It takes more time, or gives more, than the size of the database explains.
            sqlite3.Error: The database is damaged.
        """
        try:
            return self._rows(sql, tuple(values))
        except (UnreadableFileError, sqlite3.DataError):
            if not self._measure():
                raise
        return self._rows(sql, tuple(values))  # a run has written more since it was opened

    def _rows(self, sql: str, values: tuple[object, ...]) -> tuple[list[str], list[Any]]:
        most_rows, most_bytes = FREE_ROWS + self._size // BYTES_A_ROW, MOST_BYTES + MEMORY_A_BYTE * self._size
        self._left = (FREE_STEPS + STEPS_A_BYTE * self._size) // LOOK_EACH
        found: list[Any] = []
        try:
            cursor = self.connection.execute(sql, values)
            names = [name for name, *_ in cursor.description or ()]
            for row in cursor:
                found.append(row)
                most_bytes -= sum(map(getsizeof, row))
                if len(found) > most_rows or most_bytes < 0:
                    cursor.close()
                    raise UnreadableFileError(f"{self.path}: a table gives more than a file of this size can hold")
        except sqlite3.OperationalError as error:
            if self._left < 0:
                raise UnreadableFileError(
                    f"{self.path}: a query takes longer than the size of the file explains"
                ) from error
            raise
        return names, found

    def check_tables(self, wanted: Mapping[str, Collection[str]]) -> None:
        """Raise UnreadableFileError unless each of these is a plain table with these plain columns; ignore others.

        Args:
            wanted: The names of the columns, by the name of their table.
        """
        _, rows = self.rows("SELECT type, name, rootpage, sql FROM sqlite_master")
        schema = (tuple(wanted), *((kind, name, bool(page), sql) for kind, name, page, sql in rows))
        if schema not in self._sound:
            self._check_tables(wanted)
            if len(self._sound) >= MOST_SCHEMAS:
                self._sound.clear()
            self._sound.add(schema)

    def _check_tables(self, wanted: Mapping[str, Collection[str]]) -> None:
        sql = """SELECT t.name, c.name, c.hidden FROM sqlite_master AS t JOIN pragma_table_xinfo(t.name) AS c
                 WHERE t.type = 'table' AND t.rootpage > 0 AND t.name IN (SELECT value FROM json_each(?))"""
        _, rows = self.rows(sql, (json.dumps(list(wanted)),))
        plain = {(table, column): not hidden for table, column, hidden in rows}
        for table, columns in wanted.items():
            if not any(of == table for of, _ in plain):
                raise UnreadableFileError(f"{self.path}: it has no table {table}, or a view in its place")
            for column in columns:
                if not plain.get((table, column)):
                    why = "computes its" if (table, column) in plain else "has no"
                    raise UnreadableFileError(f"{self.path}: its table {table} {why} column {column}")

    def _is_over(self) -> bool:
        self._left -= 1
        return self._left < 0

    def _measure(self) -> bool:
        """Measure the database and its write-ahead log on disk, without holes, and return whether they have grown."""
        before, self._size = self._size, 0
        for path in (self.path, f"{self.path}-wal"):
            with suppress(OSError):
                found = os.stat(path)  # noqa: PTH116
                self._size += min(found.st_size, 512 * found.st_blocks + FREE_BYTES)
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(MOST_BYTES, self._size + FREE_BYTES))
        return self._size > before


def check_beside(path: Path) -> None:
    """Raise UnreadableFileError if SQLite would open a file beside the database that no run has made.

    SQLite follows links, writes into its shared memory, and deletes the file that a rollback journal names.
    """
    for end in ("-journal", "-wal", "-shm"):
        beside = f"{path}{end}"
        try:
            found = os.lstat(beside)
        except OSError:
            continue
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise UnreadableFileError(
                f"{beside}: SQLite would open it, but it is a link or not a regular file; remove it"
            )


def check_journal(path: Path) -> None:
    """Raise UnreadableFileError if a rollback journal beside the database names a file that SQLite would delete.

    Call it before opening the database for writing; no run writes such a journal.
    """
    check_beside(path)
    journal = path.with_name(f"{path.name}-journal")
    try:
        with journal.open("rb") as file:
            file.seek(max(0, journal.stat().st_size - len(_SUPER_JOURNAL)))
            end = file.read(len(_SUPER_JOURNAL))
    except OSError:
        return
    if end == _SUPER_JOURNAL:
        raise UnreadableFileError(
            f"{journal}: it tells SQLite to delete another file, which no run's journal does; remove it"
        )


def _connected(path: Path) -> sqlite3.Connection:
    """Return a connection that cannot write to the file."""
    address = f"{path.as_uri()}?mode=ro"
    if shared_kind(path.parent) is not None and not has_locks(path.parent, fcntl.lockf):
        return _without_locks(address)
    connection = _opened(address)
    try:
        connection.execute("PRAGMA user_version")
    except sqlite3.OperationalError:
        connection.close()
        if not has_locks(path.parent, fcntl.lockf):
            return _without_locks(address)
        if any(path.with_name(f"{path.name}{end}").exists() for end in ("-wal", "-journal")):
            raise
        # A folder that cannot be written to: a reader would put its shared memory there. Nobody writes the file either.
        return _opened(f"{address}&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _without_locks(address: str) -> sqlite3.Connection:
    """Return a connection on a file system without locks; the exclusive mode reads a store in write-ahead mode, too."""
    connection = _opened(f"{address}&vfs=unix-none")
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _opened(address: str) -> sqlite3.Connection:
    """Return a connection that trusts nothing in the file."""
    connection = sqlite3.connect(address, uri=True, isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_VIEW, False)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_TRIGGER, False)
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {pragma}")
    return connection
