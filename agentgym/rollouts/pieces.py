"""Encoding in pieces: a tokenizer cuts its text at its marks first, so what lies between them stands alone."""

import re
from typing import Any

_SHORT = 16
"""Longer pieces are not remembered: they seldom come twice."""
_KNOWN = 4096
_PROBES = (" a b", "1\n", "\n\nx", "é ", "A.", "\t", "user\n")


class Pieces:
    """The ids of a text, as the tokenizer gives them; the short pieces that a template repeats are encoded once.

    Where a tokenizer does not cut at its marks alone (it eats the spaces around them, or treats the beginning of a
    text in its own way), every text is encoded whole.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.ids: dict[str, list[int]] = {}
        self.pattern: re.Pattern[str] | None = None
        marks = {
            token.content: [number]
            for number, token in backend.get_added_tokens_decoder().items()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }
        if marks:
            longest_first = sorted(marks, key=len, reverse=True)
            self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
            self.ids = marks if self._stand_alone(longest_first[0]) else {}
            self.pattern = self.pattern if self.ids else None

    def encode(self, text: str) -> list[int]:
        """The ids of the whole text."""
        if self.pattern is None:
            return self._whole(text)
        ids: list[int] = []
        for piece in self.pattern.split(text):
            if piece:
                known = self.ids.get(piece)
                ids += known if known is not None else self._new(piece)
        return ids

    def _new(self, piece: str) -> list[int]:
        ids = self._whole(piece)
        if len(piece) <= _SHORT and len(self.ids) < _KNOWN:
            self.ids[piece] = ids
        return ids

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def _stand_alone(self, mark: str) -> bool:
        """Whether texts next to a mark have the ids they have alone."""
        middle = self._whole(mark)
        return all(
            self._whole(before + mark + behind) == self._whole(before) + middle + self._whole(behind)
            for before in ("", *_PROBES)
            for behind in ("", *_PROBES)
        )
