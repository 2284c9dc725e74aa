"""A cache of words' token ids, which works because byte-level BPE never merges across the end of a word.

A byte-level tokenizer first splits a text into words with one pattern, then merges inside each word. A word therefore
has the same ids everywhere, and most words can be looked up instead of encoded. A new word is merged by the
tokenizer's model alone, in a sixth of the time that the whole tokenizer would need::

    "The sum of 3 and 4"    The |  sum |  of |  3 |  and |  4
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable
from typing import Any


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each character of byte-level vocabularies represents.

    Visible bytes are represented by themselves, the others by the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_of_char()
_CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}
"""The character that byte-level vocabularies write for each byte. The code of an ASCII character is its byte, so
`str.translate` can use this table for ASCII text.
"""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of a ByteLevel pre-tokenizer without a custom pattern."""
_USUAL = re.compile(r"[ -~\t\r\n]*")
"""Matches texts that all regular expression engines split the same way, and that NFC normalization doesn't change."""
_LONGEST = 1 << 17
"""Length, in characters, of the longest text that is encoded word by word. The list of its words needs memory."""
_KNOWN = 1 << 16
"""Maximum number of cached words. When it is reached, the cache is cleared."""
_WORD = 64
"""Length in characters of the longest cached word. Longer words seldom occur twice, and would fill the memory."""
_PROBES = (
    "it's 12345 o'clock, said I'LL  be\t\tback\n\n  (now)   \r\n x=1;y_z+=2 [a.b]{c}  ",
    "   leading\n\n\ntrailing   \n",
    "\n",
    "http://a.b/c?d=e&f=%20#g --flag=\"v\" 'q' $100,000.00 A1b2C3\t",
)


def raw_ids(ids: Iterable[int]) -> bytes:
    """Return the ids as the bytes of an array of type "q", eight bytes per id, which are fast to concatenate."""
    return array("q", ids).tobytes()


class WordCache:
    """Encodes plain texts exactly as the tokenizer does, and caches the ids of their words."""

    def __init__(self, backend: Any, pattern: Any) -> None:
        self.words, self.ids = pattern.findall, _Words(backend.model.tokenize)

    @classmethod
    def of(cls, backend: Any) -> "WordCache | None":
        """Return a cache for a tokenizer, or None if its words can't be cached.

        This is so if the tokenizer's pattern is unknown, or if the cache gives a test text other ids than the
        tokenizer does.
        """
        pattern = _pattern(backend)
        if pattern is None:
            return None
        words = cls(backend, pattern)
        same = all(
            words.encode(text) == raw_ids(backend.encode(text, add_special_tokens=False).ids) for text in _PROBES
        )
        return words if same else None

    def encode(self, text: str) -> bytes | None:
        """Return the ids, as bytes, of a text without special tokens. None if the tokenizer must encode it whole."""
        if len(text) > _LONGEST or not _USUAL.fullmatch(text):
            return None
        return b"".join(map(self.ids.__getitem__, self.words(text)))


class _Words(dict[str, bytes]):
    """The raw ids of each word. A new word is merged when it is looked up."""

    def __init__(self, merge: Callable[[str], Any]) -> None:
        super().__init__()
        self.merge = merge

    def __missing__(self, word: str) -> bytes:
        ids = raw_ids([token.id for token in self.merge(word.translate(_CHARS))])
        if len(word) <= _WORD:
            if len(self) >= _KNOWN:
                self.clear()
            self[word] = ids
        return ids


def _pattern(backend: Any) -> Any | None:
    """Return the compiled pattern that splits a text into words, or None if the tokenizer does more than split."""
    from tokenizers import models

    if not isinstance(backend.model, models.BPE) or backend.model.dropout:
        return None
    if backend.truncation or backend.padding or _state(backend.normalizer).get("type", "NFC") != "NFC":
        return None
    written = _written(_state(backend.pre_tokenizer))
    if written is None:
        return None
    if (plain := _ascii(written)) is not None:
        return plain
    import regex

    try:
        return regex.compile(written)
    except regex.error:
        return None


def _written(cut: dict[str, Any]) -> str | None:
    """Return the pattern by which a byte-level pre-tokenizer splits a text into words.

    The pattern may also be that of a plain split that precedes the byte-level pre-tokenizer.

    Args:
        cut: The settings of the pre-tokenizer.

    Returns:
        The pattern, or None if the pre-tokenizer does anything else.
    """
    parts = cut["pretokenizers"] if cut.get("type") == "Sequence" else [cut]
    *splits, level = parts or [{}]
    if level.get("type") != "ByteLevel" or level["add_prefix_space"] or len(splits) > 1:
        return None
    if not splits:
        return _GPT2 if level["use_regex"] else None
    (split,) = splits
    plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if level["use_regex"] or not plain or "(" in split["pattern"].get("Regex", "(").replace("(?", ""):
        return None  # a capturing group would change what findall returns
    written: str = split["pattern"]["Regex"]
    return written


def _ascii(written: str) -> re.Pattern[str] | None:
    """Return a pattern for `re` that splits ASCII texts in the same way in half the time, or None if there is none."""
    inside = False
    parts = list[str]()
    for piece in re.findall(r"\\p\{\w+\}|\\.|.", written, re.DOTALL):
        if piece.startswith("\\p"):
            letters = _LETTERS.get(piece[3:-1])
            if letters is None or not (letters or inside):
                return None
            parts.append(letters if inside else f"[{letters}]")
            continue
        inside = (inside or piece == "[") and piece != "]"
        parts.append(piece)
    plain = "".join(parts)
    try:
        return None if "[]" in plain or "[^]" in plain else re.compile(plain)
    except re.error:
        return None


_LETTERS = {"L": "a-zA-Z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""The ASCII characters in the character classes that tokenizers' patterns use."""


def _state(part: Any) -> dict[str, Any]:
    """Return the settings of one part of a tokenizer, or {} if the tokenizer doesn't have this part."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state
