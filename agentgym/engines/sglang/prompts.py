"""Prompts of requests: checked ids and their JSON.

A session's prompt usually begins with its last one, so only the new ids are checked and written. With a thousand ids,
checking and writing all of them would cost more than the rest of a request.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Prompt(NamedTuple):
    """Ids of the vocabulary, and their text inside a JSON array."""

    ids: list[int]
    text: str

    def then(self, ids: list[int]) -> "Prompt":
        """Return the prompt with more ids behind it; they must be plain integers of the vocabulary."""
        return Prompt(self.ids + ids, _joined(self.text, ids)) if ids else self


NOTHING = Prompt([], "")


class Prompts:
    """The last prompt of each session, until it is released."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._last: dict[str, Prompt] = {}

    def take(self, session: str, token_ids: Sequence[int]) -> Prompt:
        """Return the session's next prompt; ValueError that names the first bad id."""
        if isinstance(token_ids, np.ndarray):
            token_ids = checked(token_ids, self.vocabulary)
        ids, last = list(token_ids), self._last.get(session, NOTHING)
        if ids[: len(last.ids)] != last.ids:
            last = NOTHING
        if ids != last.ids or not ids:
            new = checked(ids[len(last.ids) :], self.vocabulary, first=len(last.ids))
            # The caller's own integers, not copies: the next turn compares them by identity first.
            last = Prompt(ids, _joined(last.text, new))
        self._last[session] = last
        return last

    def release(self, session: str) -> None:
        """Forget a session; unknown ones are forgotten already."""
        self._last.pop(session, None)


def checked(token_ids: Sequence[int], vocabulary: int, *, first: int = 0) -> list[int]:
    """Return the ids as plain integers; ValueError names the first bad one, counting positions from `first`."""
    # For a turn's few ids numpy costs more than they do.
    plain = token_ids if type(token_ids) is list and {*map(type, token_ids)} == {int} else []
    if plain and min(plain) >= 0 and max(plain) < vocabulary:
        return plain
    ids = np.array(token_ids)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu" or holds_bool(token_ids):
        raise ValueError("token_ids: must be a sequence of at least one integer")
    if ids.min() < 0 or ids.max() >= vocabulary:
        where = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
        raise ValueError(
            f"token_ids: id {ids[where]} at position {first + where} is not in the vocabulary of {vocabulary}"
        )
    values: list[int] = ids.tolist()
    return values


def holds_bool(token_ids: Sequence[int]) -> bool:
    """Whether the ids hold a True or False, which numpy would take for 1 or 0."""
    return not isinstance(token_ids, np.ndarray) and not {bool, np.bool_}.isdisjoint(map(type, token_ids))


def _joined(text: str, ids: list[int]) -> str:
    new = str(ids)[1:-1].replace(" ", "")
    return f"{text},{new}" if text else new
