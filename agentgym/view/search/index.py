"""Full-text search in an index that the viewer owns, which never blocks the store and reports its progress."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from agentgym.store.texts import RolloutTexts, marks, texts_behind
from agentgym.view.answers import Refused
from agentgym.view.runs import Run
from agentgym.view.search.cache import remove

VERSION = 1
BATCH = 25
"""How many rollouts are read and indexed at a time."""
BUSY_S = 5.0
DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_ALONE = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2190-\u2bff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\U0001f000-\U0001faff\U00020000-\U0003ffff]"
)
"""Characters that count as separate words: those of scripts without spaces, and emoji."""
_TERM = re.compile(r'"([^"]*)"?|(\S+)')
_TABLES = f"""
PRAGMA user_version = {VERSION};
CREATE TABLE IF NOT EXISTS indexed (number INTEGER PRIMARY KEY, mark TEXT NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(
    text, content='', tokenize="unicode61 remove_diacritics 2 categories 'L* N* Co So'"
);
"""


class Unsearchable(Refused):
    """An index that can't be read or written for now."""

    def __init__(self, path: Path, error: sqlite3.Error) -> None:
        super().__init__(f"{path}: the search index cannot be used ({error}); the viewer will try again soon", 409)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        self.is_damaged = code in DAMAGED
        self.is_disk_full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


class SearchIndex:
    """Finds the rollouts of one run by their words. Several threads and several viewers may read and write it at once.

    It is stored in a folder of the viewer under the run's key, never in the run's folder, whose files can't be
    trusted.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.path = folder / f"{run.key}.sqlite"
        for _ in range(2):  # the first attempt removes a damaged index
            with suppress(Unsearchable), self._opened():
                return

    def indexed(self) -> int:
        """Return how many rollouts are indexed."""
        with self._opened("rw") as index:
            return int(index.execute("SELECT count(*) FROM indexed").fetchone()[0])

    def numbers(self, asked: str) -> list[int]:
        """Return the rollouts that contain all words and "phrases" of the search text; any text is valid."""
        wanted = match(asked)
        if not wanted:
            return []
        with self._opened("rw") as index:
            rows = index.execute("SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY rowid", (wanted,))
            return [number for (number,) in rows]

    def advance(self) -> bool:
        """Index the next rollouts of the store, and return whether there may be more.

        The index is rebuilt if a resumed run has removed rollouts that were indexed. The store is read in short
        parts.
        """
        with self._opened() as index:
            last = index.execute("SELECT number, mark FROM indexed ORDER BY number DESC LIMIT 1").fetchone()
            with self.run.store() as store:
                if last is not None and marks(store, [last[0]]).get(last[0]) != last[1]:
                    index.executescript(f"BEGIN IMMEDIATE; DELETE FROM indexed; DROP TABLE texts; {_TABLES} COMMIT;")
                    last = None
                found = texts_behind(store, last[0] if last is not None else 0, BATCH)
            return _add(index, found) == BATCH

    def remove(self) -> None:
        """Remove the index's files; the next viewer to open the index rebuilds it from the store."""
        remove(self.path)

    @contextmanager
    def _opened(self, mode: str = "rwc") -> Iterator[sqlite3.Connection]:
        """Yield a connection; an index of another version is rebuilt, and a damaged one is removed.

        Raises:
            Unsearchable: If the index can't be used.
        """
        try:
            with closing(_connected(self.path, mode)) as index:
                yield index
        except sqlite3.Error as error:
            found = Unsearchable(self.path, error)
            if found.is_damaged:
                self.remove()
            raise found from error


def match(asked: str) -> str:
    """Return the search text as an FTS5 query, with each word and "phrase" quoted so that none acts as an operator."""
    terms = (quoted or word for quoted, word in _TERM.findall(asked))
    return " ".join(f'"{_spaced(term)}"' for term in terms if term.strip())


def snippet(texts: list[str], asked: str, around: int = 60) -> str | None:
    """Return the text around the first search term that occurs literally in the texts, or None if no term does.

    Args:
        texts: The texts of a rollout.
        asked: The search text.
        around: Number of characters to show before and after the term.
    """
    for quoted, word in _TERM.findall(asked):
        term = (quoted or word).strip('"').casefold()
        for text in texts if term else ():
            at = text.casefold().find(term)
            if at >= 0:
                start, stop = max(0, at - around), at + len(term) + around
                piece = " ".join(text[start:stop].split())
                return f"{'…' if start else ''}{piece}{'…' if stop < len(text) else ''}"
    return None


def _spaced(text: str) -> str:
    """Return the text as it is indexed and searched: only characters that SQLite can store, split into words."""
    sound = text.replace("\0", " ").replace('"', " ").encode("utf-8", "replace").decode()
    return sound if sound.isascii() else _ALONE.sub(r" \g<0> ", sound)


def _add(index: sqlite3.Connection, found: list[RolloutTexts]) -> int:
    index.execute("BEGIN IMMEDIATE")
    try:
        last = index.execute("SELECT max(number) FROM indexed").fetchone()[0] or 0
        fresh = [one for one in found if one.number > last]  # another viewer may have indexed some
        index.executemany("INSERT INTO indexed VALUES (?, ?)", [(one.number, one.mark) for one in fresh])
        rows = [(one.number, "\n".join(map(_spaced, one.texts))) for one in fresh]
        index.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", rows)
        index.execute("COMMIT")
    except BaseException:
        if index.in_transaction:  # on a full disk, SQLite has already rolled back
            index.execute("ROLLBACK")
        raise
    return len(found)


def _connected(path: Path, mode: str = "rwc") -> sqlite3.Connection:
    """Return a connection to the index; mode "rwc" creates the index if it doesn't exist."""
    index = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        if index.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            index.execute("PRAGMA journal_mode = WAL")
            index.executescript(
                f"BEGIN IMMEDIATE; DROP TABLE IF EXISTS indexed; DROP TABLE IF EXISTS texts; {_TABLES} COMMIT;"
            )
        index.execute("PRAGMA synchronous = OFF")  # the index can be rebuilt
    except BaseException:
        index.close()
        raise
    return index
