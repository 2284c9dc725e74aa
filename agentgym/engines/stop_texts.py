"""Texts that end a turn, looked for in what it has sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.types.arrays import Ints
from agentgym.types.completion import FinishReason, Sampling

_PENDING = 8
"""Ids that may make up one character: no tokenizer needs more than four, one for each byte of it."""


@dataclass(slots=True)
class StopTexts:
    """Finds a text of `Sampling.stop` as soon as a turn has sampled the whole of it.

    It reads one turn, id by id. What an id costs does not grow with the turn: only the ids that are not read yet are
    decoded, behind those that were read before them::

        ids     a  b  c  d  e  f     f is new, and e may be a part of the same character
        before        c  d           read, and decoded again: some tokenizers decode the first id in another way
        now           c  d  e  f     what follows the text of `before` is new

    A text that is a special token (<|im_end|>) is a stop token like any other: it is no part of the message.
    """

    tokenizer: ChatTokenizer
    texts: tuple[str, ...]
    special_token_ids: frozenset[int]
    kept: int
    """Characters of the text that are kept: one fewer than the longest of the texts has."""
    _text: str = field(default="", init=False)
    """The end of the text that was read."""
    _before: int = field(default=0, init=False)
    """The first id that is decoded again."""
    _read: int = field(default=0, init=False)
    """How many ids were read."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, sampling: Sampling) -> Self | None:
        """Return what looks for the texts of `sampling` in one turn; None if there are none."""
        if not sampling.stop:
            return None
        kept = max(map(len, sampling.stop)) - 1
        return cls(tokenizer, sampling.stop, frozenset(cls.special_tokens(tokenizer, sampling)), kept)

    @staticmethod
    def special_tokens(tokenizer: ChatTokenizer, sampling: Sampling) -> tuple[int, ...]:
        """Return the ids of those texts that are special tokens."""
        known: Mapping[str, int] = getattr(tokenizer, "special_token_ids", {})
        return tuple(known[text] for text in sampling.stop if text in known)

    @classmethod
    def plain(cls, tokenizer: ChatTokenizer, sampling: Sampling) -> Sampling:
        """Return `sampling` without the texts that are special tokens, which are named by their ids instead."""
        if not cls.special_tokens(tokenizer, sampling):
            return sampling
        known: Mapping[str, int] = tokenizer.special_token_ids  # type: ignore[attr-defined]  # `special_tokens` has found one
        return replace(sampling, stop=tuple(text for text in sampling.stop if text not in known))

    def reason(self, ids: Ints) -> FinishReason | None:
        """Return how a turn ends whose last id has just been sampled; None where it goes on."""
        if int(ids[-1]) in self.special_token_ids:
            return "stop"
        text = self._text + self._new(ids)
        if not text.endswith("\ufffd"):
            self._keep(text, len(ids))
        elif len(ids) - self._read > _PENDING:  # Bytes that are no character.
            self._keep(self._text + self._new(ids[: -_PENDING // 2]), len(ids) - _PENDING // 2)
        return "stop_text" if any(stop in text for stop in self.texts) else None

    def _new(self, ids: Ints) -> str:
        """The text of the ids that are not read yet."""
        before = self.tokenizer.decode(ids[self._before : self._read].tolist()) if self._read else ""
        return self.tokenizer.decode(ids[self._before :].tolist())[len(before) :]

    def _keep(self, text: str, read: int) -> None:
        self._text = text[-self.kept :] if self.kept else ""
        self._before, self._read = self._read, read
