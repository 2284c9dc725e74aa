"""Read-only access to untrusted SQLite databases, with the time of each read limited by the database's size."""

import fcntl
import os
import sqlite3
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from sys import getsizeof
from typing import Any, ClassVar

from agentgym.files.file_systems import has_locks, shared_kind
from agentgym.files.foreign.opening import MOST_BYTES, UnreadableFileError, regular_file
from agentgym.files.foreign.tables import Table, wrong_with

LOOK_EACH = 10_000
"""Steps of SQLite's virtual machine between two checks of the limit; they take a fraction of a millisecond."""
FREE_STEPS = 20_000_000
"""Steps that every read may take, about a second."""
STEPS_A_BYTE = 50
"""Additional steps per byte of the file; a row of a run's store has hundreds of bytes and takes tens of steps."""
FREE_ROWS, BYTES_A_ROW = 1000, 32
"""Rows that every statement may return, and bytes of the file per additional row."""
FREE_BYTES = 1 << 20
"""Bytes by which a single value may exceed the file's size."""
MEMORY_A_BYTE = 16
"""Bytes of memory that the rows of a statement may take per byte of the file, in addition to MOST_BYTES.

It is above 1 because Python objects are larger than the stored values: a one-byte number takes 28 bytes in memory.
"""
MOST_SCHEMAS = 100
LIMITS: Mapping[int, int] = {
    sqlite3.SQLITE_LIMIT_LENGTH: MOST_BYTES,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 16,
}
"""Limits of every connection, which apply to the file's schema as well."""
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""End of a rollback journal that names a file for SQLite to delete."""


@dataclass(slots=True)
class ReadCost:
    """Counts the steps of one read over all of its statements."""

    looks: int = 0
    """Number of times that LOOK_EACH steps have passed."""


class ForeignDatabase:
    """Reads a database without trusting it: nothing in the file runs as code, and results are limited.

    The steps are limited per read, which is a statement, or all statements within a block of `one_read`. A run may
    write to the database meanwhile. The reader writes nothing except SQLite's own shared memory next to a database in
    write-ahead mode, `NAME-shm`; it never rolls back a rollback journal.

    Args:
        path: The database file.
        within: The folder that a symbolic link must not lead out of; None lets links lead anywhere.

    Raises:
        FileNotFoundError: If the file doesn't exist.
        UnreadableFileError: If it, or a file that SQLite would open next to it, isn't a regular file.
        sqlite3.Error: If it isn't a database, or another process has locked it.
    """

    _sound: ClassVar[set[tuple[object, ...]]] = set()
    """Schemas that were checked and are as expected; most stores share the same one."""

    def __init__(self, path: Path, *, within: Path | None) -> None:
        self.path = regular_file(path, within=within)
        check_beside(self.path)
        self.connection = _connected(self.path)
        self._read: ReadCost | None = None
        self._size = -1
        self._measure()
        self.connection.set_progress_handler(self._is_over, LOOK_EACH)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def rows(self, sql: str, values: Collection[object] = ()) -> tuple[list[str], list[Any]]:
        """Return a statement's column names and rows.

        Args:
            sql: The statement.
            values: Values for its placeholders.

        Raises:
            UnreadableFileError: If the statement takes too long, or returns too much, for the size of the database.
            sqlite3.Error: If the database is damaged.
        """
        with self.one_read() as read:
            before = read.looks
            try:
                return self._rows(sql, tuple(values))
            except (UnreadableFileError, sqlite3.DataError):
                if not self._measure():
                    raise
            read.looks = before
            return self._rows(sql, tuple(values))  # a run has written more since the limits were measured

    @contextmanager
    def one_read(self, read: ReadCost | None = None) -> Iterator[ReadCost]:
        """Count the statements within the block as one read; a nested block belongs to the read of the outer block.

        Args:
            read: The read to continue; None starts a new one.

        Yields:
            The cost of the read.
        """
        outer = self._read
        self._read = found = outer or read or ReadCost()
        try:
            yield found
        finally:
            self._read = outer

    def _rows(self, sql: str, values: tuple[object, ...]) -> tuple[list[str], list[Any]]:
        most_rows, most_bytes = FREE_ROWS + self._size // BYTES_A_ROW, MOST_BYTES + MEMORY_A_BYTE * self._size
        found: list[Any] = []
        try:
            cursor = self.connection.execute(sql, values)
            names = [name for name, *_ in cursor.description or ()]
            for row in cursor:
                found.append(row)
                most_bytes -= sum(map(getsizeof, row))
                if len(found) > most_rows or most_bytes < 0:
                    cursor.close()
                    raise UnreadableFileError(
                        f"{self.path}: a query returned more data than a file of this size can contain"
                    )
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
                raise UnreadableFileError(f"{self.path}: reading it takes too long for the size of the file") from error
            raise
        return names, found

    def check_tables(self, wanted: Mapping[str, Table]) -> None:
        """Check that these are plain tables, with their columns, keys and indexes.

        Args:
            wanted: The expected tables by name.

        Raises:
            UnreadableFileError: If one of them isn't.
        """
        with self.one_read():
            _, rows = self.rows("SELECT type, name, rootpage, sql FROM sqlite_master")
            schema = (tuple(wanted), *((kind, name, bool(page), sql) for kind, name, page, sql in rows))
            if schema in self._sound:
                return
            if (why := wrong_with(wanted, self.rows, [row[:3] for row in rows])) is not None:
                raise UnreadableFileError(f"{self.path}: {why}")
        if len(self._sound) >= MOST_SCHEMAS:
            self._sound.clear()
        self._sound.add(schema)

    def _is_over(self) -> bool:
        if self._read is None:
            return False
        self._read.looks += 1
        return self._read.looks * LOOK_EACH > FREE_STEPS + STEPS_A_BYTE * self._size

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
    """Raise UnreadableFileError if a file that SQLite would open next to the database can't have been written by a run.

    SQLite follows links, writes into its shared memory file, and deletes the file that a rollback journal names.
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
    """Raise UnreadableFileError if a rollback journal next to the database names a file that SQLite would delete.

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
            f"{journal} tells SQLite to delete another file, which no run's journal does; remove it"
        )


def _connected(path: Path) -> sqlite3.Connection:
    """Return a connection that can't write to the file."""
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
        # The folder isn't writable, so a reader can't create its shared memory there. Nobody writes the file either.
        return _opened(f"{address}&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _without_locks(address: str) -> sqlite3.Connection:
    """Return a connection for a file system without locks; exclusive mode can read a store in write-ahead mode, too."""
    connection = _opened(f"{address}&vfs=unix-none")
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _opened(address: str) -> sqlite3.Connection:
    """Return a connection that trusts nothing in the file."""
    connection = sqlite3.connect(address, uri=True, isolation_level=None)
    for limit, most in LIMITS.items():
        connection.setlimit(limit, most)
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_VIEW, False)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_TRIGGER, False)
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {pragma}")
    return connection
