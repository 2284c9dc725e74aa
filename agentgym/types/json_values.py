"""JSON values that every template and every tool accepts."""

import math
import re
from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 100
"""Maximum nesting of lists and objects in a call's arguments, since not every template can write more."""
MOST_DIGITS = 4300
"""Maximum number of digits of an integer that Python writes and parses."""
_BEYOND = 10**MOST_DIGITS
"""The smallest integer with more digits."""
UNSOUND = (
    "must not contain NaN, Infinity, a lone surrogate, a number of more than 4,300 digits or more than "
    f"{MAX_DEPTH} levels of nesting"
)
"""The requirements of `is_sound` for use in messages, after the name of the value."""
_HALF = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """Return the text with each lone surrogate replaced by U+FFFD, because UTF-8 can't encode it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub("\ufffd", text)
    return text


def members_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dict: the `object_pairs_hook` of a reader that loses no value.

    Raises:
        ValueError: If a name occurs twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a name twice")
    return made


def writable(value: Any) -> Any:
    """Return a JSON value as every reader of JSON takes it.

    Lone surrogates in its texts are replaced by U+FFFD, and numbers that aren't finite by None.
    """
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, dict):
        return {writable(key): writable(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [writable(inner) for inner in value] if isinstance(value, list | tuple) else value


def is_sound(value: object) -> bool:
    """Return whether numbers are finite, text has no lone surrogates, and nesting is at most MAX_DEPTH levels.

    Python's json also accepts NaN, Infinity and lone surrogates, and nests as deep as the stack allows. An integer
    with more than 4,300 digits, which only Python code can create, isn't sound, because it can't be written.
    """
    level: list[object] = [value]
    for depth in range(MAX_DEPTH + 1):
        below: list[object] = []
        for item in level:
            if type(item) is str or isinstance(item, str):  # `type` first, because it is faster.
                if not (item.isascii() or whole_characters(item) is item):
                    return False
            elif type(item) is int:
                if not -_BEYOND < item < _BEYOND:
                    return False
            elif isinstance(item, (dict, list)):
                if depth == MAX_DEPTH:
                    return False
                below += [*item, *item.values()] if isinstance(item, dict) else item
            elif isinstance(item, (int, float)) and not _is_number(item):
                return False
        if not below:
            break
        level = below
    return True


def _is_number(value: int | float) -> bool:
    return math.isfinite(value) if isinstance(value, float) else -_BEYOND < value < _BEYOND
