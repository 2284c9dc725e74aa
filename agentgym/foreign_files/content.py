"""Unpacking and parsing of what somebody else may have written: no few bytes become many."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

from agentgym.foreign_files.opening import MOST_BYTES, UnreadableFileError, read_bytes

MOST_LEVELS = 200
"""The most levels of lists and objects in JSON: code that walks them calls itself for each."""
MOST_VALUES = 1 << 22
"""The most lists, objects and commas of one JSON text; each becomes a Python object of up to 100 bytes."""
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What goes wrong where values are not what they should be."""
_SMALL = 1 << 22
"""JSON of fewer bytes cannot become more than memory holds, whatever is in it."""
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A text in JSON, or one that is never closed: to look for its end from each quote in it would take for ever."""


class Unpacker:
    """Unpacks the compressed JSON of one thing, such as a rollout; all of it together has a limit."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = self._left = most

    def unpacked(self, blob: bytes) -> Any:
        """Return the value that a blob of compressed JSON holds; ValueError where it is damaged or too large."""
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
    """Return the value of a JSON text; ValueError where it is none, nests too deep, or holds too many values.

    Whole numbers are as large as Python reads them, and NaN and Infinity are numbers: whoever computes with one checks
    it, as `agentgym.foreign_files.values` does.
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
    """Return the value of a file of JSON.

    Raises:
        FileNotFoundError: There is no such file.
        UnreadableFileError: It is no regular file, too large, or no JSON within the limits.
    """
    content = read_bytes(path, within=within, most=most)
    try:
        return parsed(content)
    except ValueError as error:
        raise UnreadableFileError(f"{path}: it holds no readable JSON ({error})") from error


def read_object(path: Path, *, within: Path | None, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object of a file of JSON; the errors are those of `read_json`, also where it holds no object."""
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
