"""Finds stop texts in a turn while it is sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.types.arrays import Ints
from agentgym.types.completion import FinishReason, Sampling

_PENDING = 8
"""Largest number of unread ids that wait for further ids to complete a character. If there are more, the earlier ones
count as read, because their bytes don't form a character: a character has at most four bytes, and so at most four
ids.
"""


@dataclass(slots=True)
class StopTexts:
    """Detects a stop text (`Sampling.stop`) as soon as a turn contains all of it.

    An instance reads one turn, id by id. The cost per id doesn't grow with the turn, because only the unread ids are
    decoded, together with the ids that were read just before them::

        ids     a  b  c  d  e  f     f is new, and e may be a part of the same character
        before        c  d           already read, but decoded again: some tokenizers decode the first id differently
        now           c  d  e  f     the text after that of `before` is new

    A stop text that is a special token (<|im_end|>) works like any other stop token: the message doesn't include it.
    """

    tokenizer: ChatTokenizer
    texts: tuple[str, ...]
    special_token_ids: frozenset[int]
    kept: int
    """How many characters from the end of the text to keep: the longest stop text's length minus one."""
    _text: str = field(default="", init=False)
    """The end of the text read so far."""
    _before: int = field(default=0, init=False)
    """Index of the first of the already read ids that are decoded again together with the unread ids."""
    _read: int = field(default=0, init=False)
    """Number of ids read so far."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, sampling: Sampling) -> Self | None:
        """Return a detector of the stop texts of `sampling` for one turn, or None if there are no stop texts."""
        if not sampling.stop:
            return None
        kept = max(map(len, sampling.stop)) - 1
        return cls(tokenizer, sampling.stop, frozenset(cls.special_tokens(tokenizer, sampling)), kept)

    @staticmethod
    def special_tokens(tokenizer: ChatTokenizer, sampling: Sampling) -> tuple[int, ...]:
        """Return the ids of the stop texts that are special tokens."""
        known: Mapping[str, int] = getattr(tokenizer, "special_token_ids", {})
        return tuple(known[text] for text in sampling.stop if text in known)

    @classmethod
    def plain(cls, tokenizer: ChatTokenizer, sampling: Sampling) -> Sampling:
        """Return `sampling` without the stop texts that are special tokens.

        This is for engines that receive the ids of those texts separately.
        """
        if not cls.special_tokens(tokenizer, sampling):
            return sampling
        known: Mapping[str, int] = tokenizer.special_token_ids  # type: ignore[attr-defined]  # `special_tokens` has found one
        return replace(sampling, stop=tuple(text for text in sampling.stop if text not in known))

    def reason(self, ids: Ints) -> FinishReason | None:
        """Return the finish reason if the id sampled last ends the turn, else None."""
        if int(ids[-1]) in self.special_token_ids:
            return "stop"
        text = self._text + self._new(ids)
        if not text.endswith("\ufffd"):
            self._keep(text, len(ids))
        elif len(ids) - self._read > _PENDING:  # These bytes don't form a character.
            self._keep(self._text + self._new(ids[: -_PENDING // 2]), len(ids) - _PENDING // 2)
        return "stop_text" if any(stop in text for stop in self.texts) else None

    def _new(self, ids: Ints) -> str:
        """Return the text of the unread ids."""
        before = self.tokenizer.decode(ids[self._before : self._read].tolist()) if self._read else ""
        return self.tokenizer.decode(ids[self._before :].tolist())[len(before) :]

    def _keep(self, text: str, read: int) -> None:
        self._text = text[-self.kept :] if self.kept else ""
        self._before, self._read = self._read, read
