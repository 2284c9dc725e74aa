"""Encoding word by word: what byte-level BPE does between two words does not reach into either.

Before its merges a byte-level tokenizer cuts a text into words, by one pattern, and merges inside of each. So a word's
ids are the same wherever it stands, and a table of words that came before takes the place of most encoding::

    "The sum of 3 and 4"    The |  sum |  of |  3 |  and |  4
"""

import json
import re
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How a ByteLevel pre-tokenizer with its own pattern cuts."""
_USUAL = re.compile(r"[ -~\t\r\n]*")
"""Text about which all regular expression engines agree, and that normalisation to NFC leaves as it is."""
_LONGEST = 2048
"""Longer texts go to the tokenizer whole: there it costs less a word."""
_KNOWN = 1 << 16
_WORD = 64
"""Longer words are not remembered: they seldom come twice, and 65,536 of them would fill the memory."""
_PROBES = (
    "it's 12345 o'clock, said I'LL  be\t\tback\n\n  (now)   \r\n x=1;y_z+=2 [a.b]{c}  ",
    "   leading\n\n\ntrailing   \n",
    "\n",
    "http://a.b/c?d=e&f=%20#g --flag=\"v\" 'q' $100,000.00 A1b2C3\t",
)


class Words:
    """The ids of usual texts, as the tokenizer gives them; words that came before are looked up."""

    def __init__(self, backend: Any, pattern: Any) -> None:
        self.backend, self.pattern = backend, pattern
        self.ids: dict[str, list[int]] = {}

    @classmethod
    def of(cls, backend: Any) -> "Words | None":
        """None for a tokenizer whose words cannot be told, or that was seen to encode one of its texts otherwise."""
        pattern = _pattern(backend)
        if pattern is None:
            return None
        words = cls(backend, pattern)
        same = all(words.encode(text) == backend.encode(text, add_special_tokens=False).ids for text in _PROBES)
        return words if same else None

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text without marks; None where the tokenizer should encode it whole."""
        if len(text) > _LONGEST or not _USUAL.fullmatch(text):
            return None
        known, ids = self.ids, list[int]()
        for word in self.pattern.findall(text):
            ids += known.get(word) or self._new(word)
        return ids

    def _new(self, word: str) -> list[int]:
        ids: list[int] = self.backend.encode(word, add_special_tokens=False).ids
        if len(word) <= _WORD:
            if len(self.ids) >= _KNOWN:
                self.ids.clear()
            self.ids[word] = ids
        return ids


def _pattern(backend: Any) -> Any | None:
    """The compiled pattern by which the tokenizer cuts a text into words; None where that is not all it does."""
    from tokenizers import models

    if not isinstance(backend.model, models.BPE) or backend.model.dropout:
        return None
    if backend.truncation or backend.padding or _state(backend.normalizer).get("type", "NFC") != "NFC":
        return None
    written = _written(_state(backend.pre_tokenizer))
    if written is None:
        return None
    import regex

    try:
        return regex.compile(written)
    except regex.error:
        return None


def _written(cut: dict[str, Any]) -> str | None:
    """The pattern of a byte-level pre-tokenizer, alone or behind one split into the pattern's matches."""
    parts = cut["pretokenizers"] if cut.get("type") == "Sequence" else [cut]
    *splits, level = parts or [{}]
    if level.get("type") != "ByteLevel" or level["add_prefix_space"] or len(splits) > 1:
        return None
    if not splits:
        return _GPT2 if level["use_regex"] else None
    (split,) = splits
    plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if level["use_regex"] or not plain or "(" in split["pattern"].get("Regex", "(").replace("(?", ""):
        return None  # a group that captures would change what findall gives
    written: str = split["pattern"]["Regex"]
    return written


def _state(part: Any) -> dict[str, Any]:
    """What a part of a tokenizer is made of; nothing where there is none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state
