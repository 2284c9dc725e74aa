"""The tables of a run's rollout store, and how its file is opened."""

import sqlite3
from pathlib import Path

FILE = "rollouts.sqlite"
"""The store's name in a run's folder."""

VERSION = 1
"""Raised whenever a table changes; a store of another version is refused by name."""

TABLES = """
CREATE TABLE IF NOT EXISTS tasks (
    group_id TEXT PRIMARY KEY,      -- Task.id
    task     BLOB NOT NULL          -- the task's fields, compressed JSON
);
CREATE TABLE IF NOT EXISTS rollouts (
    number      INTEGER PRIMARY KEY,  -- in the order of writing
    phase       TEXT NOT NULL,        -- "train", or the name of an evaluation
    step        INTEGER NOT NULL,     -- the step that it was played for
    group_id    TEXT NOT NULL,
    rollout_id  TEXT NOT NULL,
    reward      REAL,                 -- NULL for a rollout that failed
    stop_reason TEXT NOT NULL,
    failure     TEXT,                 -- type and message of what it failed of
    turns       INTEGER NOT NULL,
    tokens      INTEGER NOT NULL,     -- that the policy sampled
    seconds     REAL NOT NULL,
    detail      BLOB NOT NULL         -- rewards, metrics, box and traceback, compressed JSON
);
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (phase, step);
CREATE INDEX IF NOT EXISTS rollouts_by_id ON rollouts (rollout_id);
CREATE TABLE IF NOT EXISTS segments (
    rollout    INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    place      INTEGER NOT NULL,      -- Segment.index
    parent     INTEGER,
    kind       TEXT NOT NULL,
    token_ids  BLOB NOT NULL,         -- little-endian uint16 where all ids fit, else uint32
    id_bytes   INTEGER NOT NULL,      -- 2 or 4
    logprobs   BLOB NOT NULL,         -- float32, of the sampled tokens alone
    turns      BLOB NOT NULL,         -- spans, versions, times and rewards, compressed JSON
    messages   BLOB NOT NULL,         -- what it opened with, was said and was answered, compressed JSON
    trained    BLOB,                  -- float32, the trainer's log-probabilities before the step
    advantages TEXT,                  -- one number a turn, JSON
    PRIMARY KEY (rollout, place)
) WITHOUT ROWID;
"""


def open_store(path: Path, *, write: bool) -> sqlite3.Connection:
    """A connection to the store at `path`; FileNotFoundError where there is none to read.

    Readers never block the writer and see whole rollouts only: the file is in write-ahead mode, and each rollout is
    written in one transaction. Raises ValueError for a store of another version.
    """
    if not write and not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no {path.name}: is it the folder of a run?")
    connection = sqlite3.connect(path if write else f"file:{path}?mode=ro", uri=not write, isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, VERSION) or (found == 0 and not write):
        connection.close()
        raise ValueError(f"{path}: the store has version {found}, and this agentgym reads version {VERSION}")
    if write:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(TABLES)
        connection.execute(f"PRAGMA user_version = {VERSION}")
    return connection
