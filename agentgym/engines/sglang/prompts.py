"""Validates the ids of requests' prompts, and encodes them as JSON.

A session's prompt usually begins with its previous prompt, so only the new ids are validated and encoded. For a prompt
of a thousand ids, processing all of them would cost more than everything else in a request.
"""

import importlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeGuard

import numpy as np

BLOCK = 32
"""Number of ids in a block. The router compares prefixes block by block, so it doesn't notice a shared prefix that is
shorter than a block.
"""
_ID = 8
"""Bytes per id."""
_OPENINGS = 16
"""Maximum number of cached prompts that sessions began with. The rollouts of a group start with the same prompt, one
after another.
"""


def _plainly(ids: list[int]) -> bytes:
    return str(ids).replace(" ", "").encode()


_written: Callable[[list[int]], bytes] = _plainly
with suppress(ImportError):  # orjson is optional. If it is installed, encoding takes a tenth of the time.
    _written = importlib.import_module("orjson").dumps


class Prompt:
    """The ids of a prompt, as bytes and as the text inside a JSON array. More ids may be appended, but none change."""

    __slots__ = ("_blocks", "grows", "raw", "text")

    def __init__(self, raw: bytes | bytearray = b"", text: bytes | bytearray = b"") -> None:
        self.raw, self.text = bytearray(raw), bytearray(text)
        self.grows: array[int] | None = None
        """The array that the ids were read from, if ids are only ever appended to it; otherwise None."""
        self._blocks: list[int] = []

    def __len__(self) -> int:
        return len(self.raw) // _ID

    @property
    def ids(self) -> list[int]:
        """The ids as a list."""
        return memoryview(self.raw).cast("q").tolist()

    @property
    def blocks(self) -> list[int]:
        """One hash for each whole block of ids. It covers the ids of that block and of all blocks before it."""
        blocks, raw = self._blocks, self.raw
        number = blocks[-1] if blocks else 0
        for start in range(len(blocks) * BLOCK * _ID, len(raw) - BLOCK * _ID + 1, BLOCK * _ID):
            number = hash((number, bytes(raw[start : start + BLOCK * _ID])))
            blocks.append(number)
        return blocks

    def then(self, ids: list[int]) -> "Prompt":
        """Return a prompt with more ids appended. They must be plain integers within the vocabulary."""
        if not ids:
            return self
        longer = Prompt(self.raw, self.text)
        longer.grow(memoryview(array("q", ids)), ids)
        return longer

    def grow(self, raw: memoryview, ids: list[int]) -> None:
        """Append ids to this prompt. They are passed in two forms: as a view and as a list."""
        self.raw += raw
        if self.text:
            self.text += b","
        self.text += _written(ids)[1:-1]


class Prompts:
    """The last prompt of each session until its release, and the first prompts of the sessions that began last."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._last: dict[str, Prompt] = {}
        self._openings: dict[tuple[int, bytes], Prompt] = {}
        """Cached first prompts, by their number of ids and their last ids."""

    def take(self, session: str, token_ids: Sequence[int]) -> Prompt:
        """Return the session's next prompt.

        If ids were only appended, it is the same object as the session's last prompt. If `token_ids` is a view of a
        rollout's ids, the view is read, but no reference to it is kept.

        Raises:
            ValueError: If an id is invalid. The message names the first such id.
        """
        if not is_buffer(token_ids):
            token_ids = memoryview(array("q", checked(token_ids, self.vocabulary)))
        last = self._last.get(session)
        if last is None or not _begins_with(token_ids, last):
            last = self._last[session] = self._opened(token_ids)
        elif len(token_ids) > len(last):
            self._grow(last, token_ids)
        last.grows = _growing(token_ids)
        return last

    def _opened(self, token_ids: memoryview) -> Prompt:
        key = (len(token_ids), bytes(token_ids[-BLOCK:]))
        opening = self._openings.get(key)
        if opening is None or opening.raw != token_ids:
            opening = Prompt()
            self._grow(opening, token_ids)
            self._openings[key] = opening
            if len(self._openings) > _OPENINGS:
                del self._openings[next(iter(self._openings))]
        return Prompt(opening.raw, opening.text)

    def _grow(self, prompt: Prompt, token_ids: memoryview) -> None:
        known = len(prompt)
        raw = token_ids[known:]
        ids = raw.tolist()
        if not ids or min(ids) < 0 or max(ids) >= self.vocabulary:
            checked(ids, self.vocabulary, first=known)  # Raises an error that names the first bad id.
        prompt.grow(raw, ids)

    def release(self, session: str) -> None:
        """Forget a session. Unknown sessions are ignored."""
        self._last.pop(session, None)


def _begins_with(token_ids: memoryview, prompt: Prompt) -> bool:
    """Return whether `token_ids` begins with the prompt's ids.

    If both come from the same growing array of a rollout, only the last `BLOCK` ids of the prompt are compared.
    """
    known = len(prompt)
    array_grew = prompt.grows is not None and _growing(token_ids) is prompt.grows and len(token_ids) >= known
    first = max(known - BLOCK, 0) if array_grew else 0
    # With the operands in this order, Python compares the bytes in one operation.
    return prompt.raw[first * _ID :] == token_ids[first:known] if first else prompt.raw == token_ids[:known]


def _growing(token_ids: memoryview) -> "array[int] | None":
    """Return the array of a rollout's ids that `token_ids` is a view of.

    The view must be read-only and cover the array entirely, otherwise the result is None. Ids are only ever appended to
    such an array; see `Engine.generate`.
    """
    shown = token_ids.obj
    return shown if token_ids.readonly and type(shown) is array and len(shown) == len(token_ids) else None


def checked(token_ids: Sequence[int], vocabulary: int, *, first: int = 0) -> list[int]:
    """Return the ids as a list of plain integers.

    Raises:
        ValueError: If an id is invalid. The message names the first such id and its position, counted from `first`.
    """
    # For the few ids of a turn, NumPy's overhead would exceed the work itself.
    plain = token_ids if type(token_ids) is list and {*map(type, token_ids)} == {int} else []
    if plain and min(plain) >= 0 and max(plain) < vocabulary:
        return plain
    ids = np.array(token_ids)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu" or holds_bool(token_ids):
        raise ValueError("token_ids: must be a sequence of at least one integer")
    if ids.min() < 0 or ids.max() >= vocabulary:
        where = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
        raise ValueError(
            f"token_ids: id {ids[where]} at position {first + where} is not in the vocabulary of {vocabulary} ids"
        )
    values: list[int] = ids.tolist()
    return values


def is_buffer(token_ids: Sequence[int]) -> TypeGuard[memoryview]:
    """Return whether the ids are a view of eight-byte integers, as a rollout passes them."""
    return type(token_ids) is memoryview and token_ids.format == "q" and token_ids.c_contiguous and token_ids.ndim == 1


def holds_bool(token_ids: Sequence[int]) -> bool:
    """Return whether the ids contain True or False, which NumPy would treat as 1 or 0."""
    if is_buffer(token_ids):
        return False
    return not isinstance(token_ids, np.ndarray) and not {bool, np.bool_}.isdisjoint(map(type, token_ids))
