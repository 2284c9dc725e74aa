"""The tables of a run's rollout store, and the functions that open its file."""

import fcntl
import logging
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from agentgym.files.file_systems import has_locks, shared_kind
from agentgym.files.foreign.database import ForeignDatabase, check_journal
from agentgym.files.foreign.opening import UnreadableFileError, regular_file
from agentgym.files.foreign.tables import Table
from agentgym.store.run_settings import SETTINGS, other_version
from agentgym.types.transcript import one_line

_LOG = logging.getLogger(__name__)

FILE = "rollouts.sqlite"
"""Name of the store's file in a run's folder."""

VERSION = 4
"""Version of the schema, raised whenever a table or a column name changes. Stores of other versions are refused."""

OPEN_SECONDS = 5.0
"""Seconds that a writer waits while another process has locked the file."""


class StoreError(UnreadableFileError):
    """A store that can't be opened or read; the message names the file and says what to do."""


TABLES = """
CREATE TABLE IF NOT EXISTS tasks (
    group_id TEXT PRIMARY KEY,      -- Task.id
    task     BLOB NOT NULL          -- the task's fields, compressed JSON
);
CREATE TABLE IF NOT EXISTS rollouts (
    number      INTEGER PRIMARY KEY,  -- order of writing
    phase       TEXT NOT NULL,        -- "train", or the name of an evaluation
    step        INTEGER NOT NULL,     -- the step it was run for
    group_id    TEXT NOT NULL,
    rollout_id  TEXT NOT NULL,
    reward      REAL,                 -- NULL if the rollout failed
    stop_reason TEXT NOT NULL,
    failure     TEXT,                 -- type and message of its error
    turns       INTEGER NOT NULL,     -- without those of branches
    tokens      INTEGER NOT NULL,     -- tokens that the policy sampled, including in branches
    seconds     REAL NOT NULL,        -- without those of branches
    detail      BLOB NOT NULL,        -- rewards, metrics, sandbox, failed cases and traceback, compressed JSON
    suspicious  TEXT,                 -- names of its suspicious signs, separated by spaces; NULL if none
    logprob_gap REAL,                 -- largest engine-trainer difference in nats; NULL if the policy had moved
    tool_calls  INTEGER,              -- calls that the model made
    tool_errors INTEGER               -- calls that failed
);
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (step, phase);
CREATE INDEX IF NOT EXISTS rollouts_by_id ON rollouts (rollout_id);
CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id);
CREATE INDEX IF NOT EXISTS rollouts_by_reward ON rollouts (reward, number);
CREATE INDEX IF NOT EXISTS rollouts_by_phase_and_reward ON rollouts (phase, reward);
CREATE INDEX IF NOT EXISTS rollouts_by_gap ON rollouts (logprob_gap) WHERE logprob_gap IS NOT NULL;
CREATE INDEX IF NOT EXISTS rollouts_suspicious ON rollouts (number) WHERE suspicious IS NOT NULL;
CREATE TABLE IF NOT EXISTS segments (
    rollout    INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    place      INTEGER NOT NULL,      -- Segment.index
    parent     INTEGER,
    kind       TEXT NOT NULL,
    token_ids  BLOB NOT NULL,         -- little-endian uint16 if all ids fit, else uint32
    id_bytes   INTEGER NOT NULL,      -- 2 or 4
    logprobs   BLOB NOT NULL,         -- float32, of the sampled tokens only
    turns      BLOB NOT NULL,         -- spans, versions, times and rewards, compressed JSON
    messages   BLOB NOT NULL,         -- prompt, tools, and the messages of model and env, compressed JSON
    trained    BLOB,                  -- float32, the trainer's log-probabilities before the step
    advantages TEXT,                  -- one number per turn, JSON
    PRIMARY KEY (rollout, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS vocabulary (
    model   TEXT NOT NULL,            -- Segment.model: "" for the policy
    ids     BLOB NOT NULL,            -- uint32, token ids that first occur here
    lengths BLOB NOT NULL,            -- uint32, number of bytes of each id
    bytes   BLOB NOT NULL             -- the UTF-8 bytes of all ids, concatenated
);
"""

_MADE = re.findall(r"^CREATE TABLE IF NOT EXISTS (\w+) \((.*?)^\)", TABLES, re.M | re.S)
_COLUMN = re.compile(r"^ {4}(\w+) +(TEXT|INTEGER|REAL|BLOB)( PRIMARY KEY| NOT NULL)?", re.M)
_KEY = re.compile(r"PRIMARY KEY \((.*)\)")
_INDEX = r"CREATE INDEX IF NOT EXISTS (\w+) ON {} \(([^)]*)\)"


def _table(name: str, body: str) -> Table:
    """Return the expected columns, key and indexes of a table, which readers compare with those of a store."""
    columns = _COLUMN.findall(body)
    key = _KEY.search(body)
    return Table(
        columns=[column for column, *_ in columns],
        key=key[1].split(", ") if key else [column for column, _, rule in columns if "KEY" in rule],
        indexes={index: of.split(", ") for index, of in re.findall(_INDEX.format(name), TABLES)},
    )


READ_TABLES: Mapping[str, Table] = {name: _table(name, body) for name, body in _MADE}
"""The tables that a readable store must have, by name."""
_TYPES: Mapping[str, type] = {"TEXT": str, "INTEGER": int, "REAL": float, "BLOB": bytes, "NULL": type(None)}
_RENAMED = {
    "turns_of_segment": ("BLOB", "NOT NULL"),
    "mark": ("TEXT", "NOT NULL"),
    "first_step": ("INTEGER", ""),
    "last_step": ("INTEGER", ""),
}
_COLUMNS = {name: (kind, rule) for name, kind, rule in reversed(_COLUMN.findall(TABLES))}
KINDS: Mapping[str, tuple[str, bool]] = {name: (kind, not rule) for name, (kind, rule) in (_RENAMED | _COLUMNS).items()}
"""Type of each column, by the name that readers query it under, and whether it may be NULL. If several tables have a
column of the same name, the type from the first of these tables is used.
"""


_ROWS = {"number": "rollout", "rollout": "rollout", "group_id": "task", "model": "tokens of the model"}
"""Name for a row in errors, by the column that identifies the row. If a row has several of these columns, the first one
here is used.
"""


def misplaced(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str | None:
    """Describe the first value whose type differs from its column's (SQLite allows that), or return None."""
    for place, name in enumerate(names):
        if name not in KINDS:
            continue
        kind, may_be_null = KINDS[name]
        right = (_TYPES[kind], type(None)) if may_be_null else (_TYPES[kind],)
        if {type(row[place]) for row in rows} <= set(right):
            continue
        if (row := next((row for row in rows if not isinstance(row[place], right)), None)) is not None:
            whose = next((f"{what} {row[names.index(of)]!r:.80}: " for of, what in _ROWS.items() if of in names), "")
            return f"{whose}its {name} is {_kind(row[place])} instead of {kind}"
    return None


def _kind(value: object) -> str:
    return next(kind for kind, of in _TYPES.items() if isinstance(value, of))


def open_store(path: Path) -> sqlite3.Connection:
    """Open a writing connection to the store at `path`, creating the store if it doesn't exist.

    Each rollout is written in one transaction, so readers only see whole rollouts. The file is in write-ahead mode, so
    readers never block the writer. That mode doesn't work on a file system that other machines may share or that has no
    locks; a reader may block the writer there. Opening waits up to OPEN_SECONDS if another process has locked the file.

    Raises:
        StoreError: If the file can't be opened, is not a store, or is a store of another version.
    """
    try:
        if os.path.lexists(path):
            path = regular_file(path, within=path.parent)
        check_journal(path)
        connection = _to_write(path)
    except sqlite3.Error as error:
        raise _cannot_open(path, error, write=True) from error
    except (UnreadableFileError, FileNotFoundError) as error:
        raise StoreError(str(error)) from error
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        _check_version(path, found)
        connection.execute("PRAGMA foreign_keys = ON")
        if (kind := _without_wal(path)) is None:
            _use_wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
        else:
            _say_shared(path, kind)
            connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        return connection
    except sqlite3.Error as error:
        connection.close()
        raise _cannot_open(path, error, write=True) from error
    except BaseException:
        connection.close()
        raise


def read_store(path: Path) -> ForeignDatabase:
    """Open a store for reading, without trusting its content; a run may be writing to it meanwhile.

    Raises:
        FileNotFoundError: If there is no store.
        StoreError: If the file is not a store, is a store of another version, or is empty.
    """
    try:
        found = ForeignDatabase(path, within=path.parent)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} contains no {path.name}; name the folder of a run") from None
    except sqlite3.Error as error:
        raise _cannot_open(path, error, write=False) from error
    except UnreadableFileError as error:
        raise StoreError(str(error)) from error
    try:
        version = found.rows("PRAGMA user_version")[1][0][0]
        _check_version(path, version)
        if version == 0:
            raise StoreError(f"{path}: the store is empty: the run has not written a rollout yet")
        found.check_tables(READ_TABLES)
        return found
    except sqlite3.Error as error:
        found.close()
        raise _cannot_open(path, error, write=False) from error
    except BaseException as error:
        found.close()
        if isinstance(error, UnreadableFileError) and not isinstance(error, StoreError):
            raise StoreError(str(error)) from error
        raise


def damaged(path: Path, error: Exception) -> StoreError:
    """Return an error that says that reading a store failed, and what can be done."""
    return StoreError(
        f"{path}: the store cannot be read ({error}); if it is damaged, `{_recover(path)}` saves what it can"
    )


def _recover(path: Path) -> str:
    return shlex.join(["sqlite3", str(path), ".recover"])


def _check_version(path: Path, found: int) -> None:
    """Raise StoreError if this version can't be read; 0 means that nothing has been written yet."""
    if found not in (0, VERSION):
        wrote = other_version(path.parent)
        named = "" if wrote is None else f", {one_line(wrote):.80} according to the folder's {SETTINGS}"
        raise StoreError(
            f"{path}: the store has version {found}, and this agentgym reads version {VERSION}; "
            f"open it with the agentgym version that wrote it{named}"
        )


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead mode; unlike SQLite itself, wait for other processes that are opening the store."""
    until = time.monotonic() + OPEN_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > until:
                raise
            time.sleep(0.02)


def _without_wal(path: Path) -> str | None:
    """Name the file system of a store if SQLite's write-ahead log doesn't work there, or return None if it works.

    The log needs file locks and a file system that only one machine uses.
    """
    return shared_kind(path.parent) or (None if has_locks(path.parent, fcntl.lockf) else "a file system without locks")


@cache
def _say_shared(path: Path, kind: str) -> None:
    """Warn once per store that it is written without a write-ahead log, and say what to do."""
    _LOG.warning(
        "%s is on %s: it is written without SQLite's write-ahead log, and reading it may make the run wait for up to "
        "%g s; while the run is active, use `agentgym show`, `view` and `report` on a copy of the folder",
        *(path, kind, OPEN_SECONDS),
    )


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _cannot_open(path: Path, error: sqlite3.Error, *, write: bool) -> StoreError:
    """Return an error that names the file and says what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_ROLLBACK:
        return StoreError(
            f"{path}: a write was interrupted, and only a writer may undo it with {path.name}-journal next to it; "
            "resume the run, or move that file out of the folder"
        )
    if _is_busy(error):
        todo = "another process has locked it; wait for that process to finish, or stop it"
    elif code == sqlite3.SQLITE_FULL:
        todo = "free space on its disk"
    elif code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        todo = "check that it is a writable file and that its disk has free space"
    elif write:
        todo = (
            f"move {path.name}, and {path.name}-wal if it exists, out of the folder; the run then creates a new store"
        )
    else:
        todo = f"if it is damaged, `{_recover(path)}` saves what it can"
    return StoreError(f"{path}: this rollout store cannot be opened ({error}); {todo}")


def _to_write(path: Path) -> sqlite3.Connection:
    """Open a connection that writes.

    On a file system without locks, it opens the store exclusively. The lock on the run's folder already ensures that
    only one process writes, and exclusive mode also opens a store that is in write-ahead mode because it came from
    elsewhere.
    """
    if has_locks(path.parent, fcntl.lockf):
        return sqlite3.connect(path, timeout=OPEN_SECONDS, isolation_level=None)
    address = f"{path.absolute().as_uri()}?mode=rwc&vfs=unix-none"
    connection = sqlite3.connect(address, uri=True, isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    except BaseException:
        connection.close()
        raise
    return connection
