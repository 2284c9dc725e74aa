"""What goes wrong with the connection of a store that is written to, and what is still to be had from it."""

import sqlite3
from contextlib import suppress

from agentgym.folders.disk import disk_trouble

WAITING = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_PERM),
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
)
"""SQLite's errors of a store that may take later what it does not take now."""


def close(connection: sqlite3.Connection | None) -> None:
    """Close the connection; one that is closed already stays so."""
    if connection is not None:
        with suppress(sqlite3.Error):
            connection.close()


def rollouts_of(connection: sqlite3.Connection) -> int:
    """Count the rollouts of a store; 1 if it cannot be told any more."""
    try:
        return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])
    except sqlite3.Error:
        return 1


def waits(error: Exception) -> bool:
    """Whether the store may take later what it did not take now."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in WAITING or disk_trouble(error) is not None


def said_of(error: Exception) -> str:
    """Return the kind of an error and its message."""
    return f"{type(error).__name__}: {error}"
