"""The bytes of the token ids that occur in a store, so that a copied store shows its tokens without the model."""

import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from agentgym.store.rows import stored_text
from agentgym.types.arrays import Bools, Ints
from agentgym.types.rollout import Rollout

log = logging.getLogger(__name__)

TokenBytes: TypeAlias = Callable[[str, Sequence[int]], Mapping[int, bytes]]
"""A function from a model role ("" for the policy) and token ids to the bytes of each id that it knows."""
LARGEST_ID = 1 << 24
"""Ids of this value or above are not stored, because no vocabulary is that large."""


class VocabularyWriter:
    """Stores the bytes of each id when it first occurs. Checking 5,000 ids that are already stored takes microseconds.

    If `token_bytes` fails, one warning is logged and the run continues without storing further bytes.
    """

    def __init__(self, token_bytes: TokenBytes | None) -> None:
        self.token_bytes = token_bytes
        self._seen: dict[str, Bools] = {}
        self._fresh: list[tuple[str, Ints]] = []
        """Model roles and ids that the current transaction has added, which may still be rolled back."""
        self._is_read = False
        """Whether the ids in the open store count as seen."""

    def forget(self) -> None:
        """Have the next `read` read the ids again, because a store was opened."""
        self._is_read = False

    def read(self, connection: sqlite3.Connection) -> None:
        """Replace the ids that count as seen by those in this store, unless that was done since the store was opened.

        Without `token_bytes`, nothing is read, since no bytes can be stored until it is set.
        """
        if self.token_bytes is None or self._is_read:
            return
        self._seen.clear()
        for model, packed_ids in connection.execute("SELECT model, ids FROM vocabulary").fetchall():
            ids = np.frombuffer(packed_ids, "<u4").astype(np.int64)
            self._mark(model, ids[ids < LARGEST_ID])
        self._is_read = True

    def add(self, connection: sqlite3.Connection, rollouts: Iterable[Rollout]) -> None:
        """Write the bytes of the rollouts' token ids that were not seen before, and count these ids as seen.

        Call `keep` when the transaction is committed, or `drop` when it is rolled back.
        """
        if self.token_bytes is None:
            return
        fresh: dict[str, list[Ints]] = {}
        for segment in (segment for rollout in rollouts for segment in rollout.segments):
            if len(unseen := self._unseen(segment.model, segment.token_ids)):
                self._mark(segment.model, unseen)
                self._fresh.append((segment.model, unseen))
                fresh.setdefault(segment.model, []).append(unseen)
        for model, parts in fresh.items():
            if (row := self._row(model, np.concatenate(parts))) is not None:
                connection.execute("INSERT INTO vocabulary VALUES (?, ?, ?, ?)", (stored_text(model), *row))

    def keep(self) -> None:
        """Continue to count the last transaction's ids as seen, since the transaction was committed."""
        self._fresh.clear()

    def drop(self) -> None:
        """Count the last transaction's ids as unseen again, since the transaction was rolled back."""
        for model, ids in self._fresh:
            self._seen[model][ids] = False
        self._fresh.clear()

    def _row(self, model: str, fresh: Ints) -> tuple[bytes, bytes, bytes] | None:
        if self.token_bytes is None:
            return None
        try:
            found = self.token_bytes(model, fresh.tolist())
            lengths = np.fromiter(map(len, found.values()), "<u4", len(found))
            return np.fromiter(found, "<u4", len(found)).tobytes(), lengths.tobytes(), b"".join(found.values())
        except Exception as error:  # the tokenizer may be the user's, and rollouts matter more than token texts
            log.warning(
                "token texts are not stored, and the run continues without them: %s: %s", type(error).__name__, error
            )
            self.token_bytes = None
            return None

    def _unseen(self, model: str, ids: Ints) -> Ints:
        seen = self._seen.get(model)
        if seen is None or (len(ids) and int(ids.max()) >= len(seen)):
            ids = ids[(ids >= 0) & (ids < LARGEST_ID)]
            seen = self._grown(model, int(ids.max(initial=-1)) + 1)
        fresh: Ints = ids[~seen[ids]]
        return np.unique(fresh) if len(fresh) else fresh

    def _grown(self, model: str, size: int) -> Bools:
        before = self._seen.get(model, np.zeros(0, np.bool_))
        if size > len(before):
            self._seen[model] = np.zeros(max(size, 2 * len(before)), np.bool_)
            self._seen[model][: len(before)] = before
        return self._seen.setdefault(model, before)

    def _mark(self, model: str, ids: Ints) -> None:
        self._grown(model, int(ids.max(initial=-1)) + 1)[ids] = True


def found_among(rows: Iterable[Sequence[bytes]], wanted: Collection[int]) -> dict[int, bytes]:
    """Return the bytes of each wanted id that occurs in these rows.

    Each row has three values: the packed ids, the packed lengths of their bytes, and the bytes, one id after another.
    """
    asked = np.fromiter(wanted, np.int64, len(wanted))
    found: dict[int, bytes] = {}
    for packed_ids, packed_lengths, text in rows:
        ids = np.frombuffer(packed_ids, "<u4")
        stops = np.cumsum(np.frombuffer(packed_lengths, "<u4"))
        for place in np.flatnonzero(np.isin(ids, asked)).tolist():
            found[int(ids[place])] = text[int(stops[place - 1]) if place else 0 : int(stops[place])]
    return found


def shown_token(given: bytes) -> str:
    """Return the text of a token, with bytes that are only part of a character in hex, such as ⟨F0 9F⟩."""
    try:
        return given.decode()
    except UnicodeDecodeError:
        return "".join(_pieces(given))


def _pieces(given: bytes) -> Iterable[str]:
    odd: list[str] = []
    while given:
        try:
            text, bad, given = given.decode(), b"", b""
        except UnicodeDecodeError as error:
            text, bad, given = given[: error.start].decode(), given[error.start : error.end], given[error.end :]
        if text and odd:
            yield f"⟨{' '.join(odd)}⟩"
            odd = []
        yield text
        odd += [f"{byte:02X}" for byte in bad]
    if odd:
        yield f"⟨{' '.join(odd)}⟩"
