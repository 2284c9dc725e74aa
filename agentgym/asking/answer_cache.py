"""Answers of judges on disk: a file of SQLite, which processes share and which outlives them."""

import hashlib
import json
import logging
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

from agentgym.folders.disk import disk_trouble

log = logging.getLogger(__name__)

TABLE = "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID"
WAIT_S = 30.0
"""How long a reader or a writer waits for another process that holds the file."""


class AnswerCache:
    """Keeps one answer for each question in a file; its methods block, and are called in threads.

    :raises ValueError: from each, naming the file, where it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, question: str) -> str | None:
        """Return the answer; None where there is none."""
        rows = self._do("SELECT answer FROM answers WHERE question = ?", question)
        return rows[0][0] if rows else None

    def put(self, question: str, answer: str) -> None:
        """Keep the answer; an earlier one to the same question stays.

        If the disk does not take it, the log says so once: the answer is there, and was paid for.
        """
        try:
            self._do("INSERT OR IGNORE INTO answers VALUES (?, ?)", question, answer)
        except ValueError as error:
            if (why := disk_trouble(error)) is None:
                raise
            _say_not_kept(self.path, why)

    def drop(self, question: str, answer: str) -> None:
        """Forget this answer; another one to the same question stays."""
        self._do("DELETE FROM answers WHERE question = ? AND answer = ?", question, answer)

    def _do(self, sql: str, *values: str) -> list[Any]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
            try:
                connection.execute(TABLE)
                return connection.execute(sql, values).fetchall()
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"cache: {self.path} cannot be used ({error}); give another file, or remove it") from error


@cache
def _say_not_kept(path: Path, why: str) -> None:
    log.warning("cache: answers cannot be written to %s (%s): they are used and not kept", path, why)


def question_key(**parts: Any) -> str:
    """Return what stands for a question in the cache: a digest of all that its answer depends on."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=20).hexdigest()
