"""Unpacking and parsing untrusted content: a few bytes never become many."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

from agentgym.foreign_files.opening import MOST_BYTES, UnreadableFileError, read_bytes

MOST_LEVELS = 200
"""The maximum nesting of lists and objects in JSON: code that walks them recurses once for each level."""
MOST_VALUES = 1 << 22
"""The maximum number of lists, objects and commas in a JSON text; each becomes a Python object of up to 100 bytes."""
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""The errors of code that meets values other than it expects."""
_SMALL = 1 << 22
"""JSON of fewer bytes fits in memory when it is parsed, whatever it holds."""
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string in JSON, or one that is never closed: looking for its end from each quote in it would take for ever."""


class Unpacker:
    """Unpacks the compressed JSON of one thing, such as a rollout, up to a total size of `most` bytes."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = self._left = most

    def unpacked(self, blob: bytes) -> Any:
        """Return the value that a blob of compressed JSON holds.

        Raises:
            ValueError: It is damaged, or too large together with what was unpacked before.
        """
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(blob, self._left + 1)
        except zlib.error as error:
            raise ValueError(f"its bytes cannot be unpacked ({error})") from error
        if len(text) > self._left:
            raise ValueError(f"it has more than {self.most:,} bytes when it is unpacked")
        if not unpacking.eof:
            raise ValueError("its bytes cannot be unpacked (they are cut off)")
        self._left -= len(text)
        return parsed(text)


def parsed(text: bytes) -> Any:
    """Return the value of a JSON text.

    Whole numbers may be as large as Python reads them, and NaN and Infinity are numbers: code that computes with one
    must check it, as `agentgym.foreign_files.values` does.

    Raises:
        ValueError: It is not JSON, nests too deep, or holds too many values.
    """
    if len(text) > _SMALL and _values(text) > MOST_VALUES and _values(_TEXT.sub(b"", text)) > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"it nests more than {MOST_LEVELS} levels") from None
    if text.count(b"[") + text.count(b"{") > MOST_LEVELS:
        _check_levels(found)
    return found


def read_json(path: Path, *, within: Path | None, most: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file; `within` and `most` are as in `read_bytes`.

    Raises:
        FileNotFoundError: There is no such file.
        UnreadableFileError: It is not a regular file, is too large, or holds no JSON within the limits.
    """
    content = read_bytes(path, within=within, most=most)
    try:
        return parsed(content)
    except ValueError as error:
        raise UnreadableFileError(f"{path}: it holds no readable JSON ({error})") from error


def read_object(path: Path, *, within: Path | None, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; the errors are those of `read_json`, also if it holds no object."""
    found = read_json(path, within=within, most=most)
    if not isinstance(found, dict):
        raise UnreadableFileError(f"{path}: it must hold a JSON object, got {type(found).__name__}")
    return found


def _values(text: bytes) -> int:
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
