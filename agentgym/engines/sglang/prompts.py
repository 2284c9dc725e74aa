"""What requests start from: ids that were checked, as JSON.

A session's prompt begins with what it was before, so only what is new in it is looked at. With a thousand ids, checking
and writing them all would cost a request more than the rest of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Prompt(NamedTuple):
    """Ids of the vocabulary, and the same as the inside of a JSON array."""

    ids: list[int]
    text: str

    def then(self, ids: list[int]) -> "Prompt":
        """These ids, plain integers of the vocabulary too, behind the prompt's."""
        return Prompt(self.ids + ids, _joined(self.text, ids)) if ids else self


NOTHING = Prompt([], "")


class Prompts:
    """The last prompt of each session, until it is released."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._last: dict[str, Prompt] = {}

    def take(self, session: str, token_ids: Sequence[int]) -> Prompt:
        """The session's next prompt; ValueError that names the first bad id."""
        if isinstance(token_ids, np.ndarray):
            token_ids = checked(token_ids, self.vocabulary)
        ids, last = list(token_ids), self._last.get(session, NOTHING)
        if ids[: len(last.ids)] != last.ids:
            last = NOTHING
        if ids != last.ids or not ids:
            new = checked(ids[len(last.ids) :], self.vocabulary, first=len(last.ids))
            # The caller's own integers, not their copies: they are compared with themselves at the next turn.
            last = Prompt(ids, _joined(last.text, new))
        self._last[session] = last
        return last

    def release(self, session: str) -> None:
        """Forget a session; unknown ones are forgotten already."""
        self._last.pop(session, None)


def checked(token_ids: Sequence[int], vocabulary: int, *, first: int = 0) -> list[int]:
    """The ids as a list of plain integers; ValueError that names the first bad one, `first` being their position."""
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
    """Whether there is a True or False among ids, which numpy takes for 1 and 0 beside integers."""
    return not isinstance(token_ids, np.ndarray) and not {bool, np.bool_}.isdisjoint(map(type, token_ids))


def _joined(text: str, ids: list[int]) -> str:
    new = str(ids)[1:-1].replace(" ", "")
    return f"{text},{new}" if text else new
