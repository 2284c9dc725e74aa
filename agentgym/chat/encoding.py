"""Encodes rendered text piece by piece, and decodes ids with a table of bytes.

A tokenizer first splits a text at its special tokens. Each piece of text between two of them can therefore be encoded
separately.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.chat.word_cache import BYTE_OF_CHAR, WordCache, raw_ids

_SHORT = 16
"""Maximum length, in characters, of a cached piece. Longer pieces seldom occur twice."""
_KNOWN = 4096
"""Maximum number of cached pieces, including special tokens."""
_LONG = 4096
"""Length, in characters, from which a text is encoded with the tokenizer's batch method, as a batch of one. Unlike the
method for a single text, the batch method lets other threads run meanwhile.
"""
_PROBES = (" a b", "1\n", "\n\nx", "é ", "A.", "\t", "user\n")


_LONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class SpecialTokenSplitter:
    """Encodes a text exactly as the tokenizer does, but encodes short pieces between special tokens only once.

    If the tokenizer does more than split at its special tokens (for example, strips spaces around them or changes the
    beginning of a text), every text is encoded whole.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.pattern: re.Pattern[str] | None = None
        self.words: WordCache | None = None
        added = backend.get_added_tokens_decoder()
        special_tokens = {
            token.content: raw_ids([number])
            for number, token in added.items()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }
        longest_first = sorted(special_tokens, key=len, reverse=True)
        if special_tokens and _stands_alone(backend, longest_first[0]):
            self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
            if len(special_tokens) == len(added):  # all added tokens are in the pattern, so none occurs in a piece
                self.words = WordCache.of(backend)
        self._pieces = _Pieces(backend, self.words, special_tokens)

    def encode(self, text: str) -> "array[int]":
        """Return the ids of the text."""
        if self.pattern is None:
            return array("q", _whole(self.backend, text))
        return array("q", b"".join(map(self._pieces.__getitem__, self.pattern.split(text))))


class _Pieces(dict[str, bytes]):
    """Maps special tokens, and the pieces between them, to their ids as bytes. A new piece is encoded on lookup."""

    def __init__(self, backend: Any, words: WordCache | None, special_tokens: Mapping[str, bytes]) -> None:
        super().__init__({"": b"", **special_tokens})
        self.backend, self.words = backend, words

    def __missing__(self, piece: str) -> bytes:
        ids = self.words.encode(piece) if self.words is not None else None
        if ids is None:
            ids = _whole(self.backend, piece)
        if len(piece) <= _SHORT and len(self) < _KNOWN:
            self[piece] = ids
        return ids


def _whole(backend: Any, text: str) -> bytes:
    if len(text) >= _LONG:
        return raw_ids(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    return raw_ids(backend.encode(text, add_special_tokens=False).ids)


def _stands_alone(backend: Any, special: str) -> bool:
    """Return whether the texts before and after a special token get the same ids as when each is encoded alone."""
    middle = _whole(backend, special)
    return all(
        _whole(backend, before + special + behind) == _whole(backend, before) + middle + _whole(backend, behind)
        for before in ("", *_PROBES)
        for behind in ("", *_PROBES)
    )


class Decoder:
    """Decodes ids exactly as the tokenizer does, including special tokens. Byte-level vocabularies use a table."""

    def __init__(self, backend: Any) -> None:
        from tokenizers.decoders import ByteLevel

        self.backend = backend
        self.added = {*backend.get_added_tokens_decoder()}
        self.table = _Bytes(backend) if isinstance(backend.decoder, ByteLevel) else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids. Invalid UTF-8 bytes become U+FFFD."""
        if self.table is not None:
            return b"".join(map(self.table.__getitem__, token_ids)).decode(errors="replace")
        text: str = self.backend.decode([*token_ids], skip_special_tokens=False)
        return text

    def pieces(self, token_ids: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of each id, which may be only part of a character. Unknown ids are left out."""
        if self.table is not None:
            return {token_id: self.table[token_id] for token_id in token_ids if self._token(token_id) is not None}
        found = {token_id: self._piece(token_id) for token_id in token_ids}
        return {token_id: piece for token_id, piece in found.items() if piece is not None}

    def _token(self, token_id: int) -> str | None:
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def _piece(self, token_id: int) -> bytes | None:
        """Return the bytes of an id in a text vocabulary, which writes a single byte as <0xAB> and a space as \\u2581.

        Returns:
            The bytes, or None if the id is unknown.
        """
        token = self._token(token_id)
        if token is None:
            return None
        if byte := _LONE_BYTE.fullmatch(token):
            return bytes([int(byte.group(1), 16)])
        if token_id in self.added or "\u2581" not in token:
            text: str = token if token_id in self.added else self.backend.decode([token_id], skip_special_tokens=False)
            return text.encode()
        return token.replace("\u2581", " ").encode()


class _Bytes(dict[int, bytes]):
    """The bytes of each id in a byte-level vocabulary. Each id is looked up in the tokenizer only once."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token: str = self.backend.id_to_token(token_id) or ""
        made = bytes(BYTE_OF_CHAR[c] for c in token) if all(c in BYTE_OF_CHAR for c in token) else token.encode()
        self[token_id] = made
        return made
