"""Unpacking and parsing untrusted content, with limits on how far a few bytes can expand."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

from agentgym.files.foreign.opening import MOST_BYTES, UnreadableFileError, read_bytes

MOST_LEVELS = 200
"""Maximum nesting of lists and objects in JSON, because code that walks them recurses once per level."""
MOST_VALUES = 1 << 21
"""Maximum number of lists, objects and commas in one JSON value. In memory, each of them takes up to 200 bytes."""
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Errors that code raises when untrusted values aren't what it expects."""
_FEW = 1 << 12
"""If JSON has at most this many delimiters, those inside strings are counted, too, because leaving those out makes
counting many times slower.
"""
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Matches a JSON string, even one that is never closed. If the closing quote were required, each later quote of an
unclosed string would start another search to the end of the text.
"""


class Unpacker:
    """Unpacks the compressed JSON of one object, such as a rollout, within limits on the total.

    Args:
        most: Maximum number of bytes.
        most_values: Maximum number of lists, objects and commas.
    """

    def __init__(self, most: int = MOST_BYTES, most_values: int = MOST_VALUES) -> None:
        self.most = self._left = most
        self.most_values = self._values_left = most_values

    def unpacked(self, blob: bytes) -> Any:
        """Return the value in a blob of compressed JSON.

        Args:
            blob: The bytes, compressed with zlib.

        Raises:
            ValueError: If it is damaged, or exceeds a limit together with what was unpacked before.
        """
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(blob, self._left + 1)
        except zlib.error as error:
            raise ValueError(f"its bytes cannot be unpacked ({error})") from error
        weight = len(text) * (1 if text.isascii() else 4)  # a single emoji makes every character take 4 bytes
        if weight > self._left:
            raise ValueError(f"it has more than {self.most:,} bytes when it is unpacked")
        if not unpacking.eof:
            raise ValueError("its bytes cannot be unpacked (they are truncated)")
        self._left -= weight
        self._values_left -= (values := values_in(text))
        if self._values_left < 0 or values > MOST_VALUES:
            most = min(self.most_values, MOST_VALUES)
            raise ValueError(f"it contains more than {most:,} values when it is unpacked")
        return _loaded(text)


def parsed(text: bytes) -> Any:
    """Parse JSON text.

    Integers may be as large as Python reads them, and NaN and Infinity are accepted as numbers: code that computes
    with a number must check it, as `agentgym.files.foreign.values` does.

    Raises:
        ValueError: If it isn't JSON, nests too deep, or contains too many values.
    """
    if len(text) > MOST_VALUES and values_in(text) > MOST_VALUES:
        raise ValueError(f"it contains more than {MOST_VALUES:,} values")
    return _loaded(text)


def read_json(path: Path, *, within: Path | None, most: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file; `within` and `most` are as in `read_bytes`.

    Raises:
        FileNotFoundError: If the file doesn't exist.
        UnreadableFileError: If it isn't a regular file, is too large, or doesn't contain JSON within the limits.
    """
    content = read_bytes(path, within=within, most=most)
    try:
        return parsed(content)
    except ValueError as error:
        raise UnreadableFileError(f"{path} contains no readable JSON ({error})") from error


def read_object(path: Path, *, within: Path | None, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; the arguments are those of `read_json`.

    Raises:
        FileNotFoundError: If the file doesn't exist.
        UnreadableFileError: As in `read_json`, or if the value isn't an object.
    """
    found = read_json(path, within=within, most=most)
    if not isinstance(found, dict):
        raise UnreadableFileError(f"{path} must contain a JSON object, got {type(found).__name__}")
    return found


def _loaded(text: bytes) -> Any:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"it nests more than {MOST_LEVELS} levels") from None
    if text.count(b"[") + text.count(b"{") > MOST_LEVELS:
        _check_levels(found)
    return found


def values_in(text: bytes) -> int:
    """Return the number of lists, objects and commas in JSON text.

    A result of at most `_FEW` may also count brackets and commas inside strings; a larger one does not.
    """
    found = _marks(text)
    return found if found <= _FEW else _marks(_TEXT.sub(b"", text))


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b",")


def _check_levels(found: Any) -> None:
    level = [found]
    for _ in range(MOST_LEVELS):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [of for of in value.values() if isinstance(of, dict | list)]
            elif isinstance(value, list):
                below += [of for of in value if isinstance(of, dict | list)]
        if not below:
            return
        level = below
    raise ValueError(f"it nests more than {MOST_LEVELS} levels")
