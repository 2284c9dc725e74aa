"""JSON values that every template and every tool can take."""

import math
import re

MAX_DEPTH = 100
"""Levels of lists and objects that a call's arguments may nest: not every template can write more."""
_BEYOND = 10**4300
"""The first whole number of more than 4,300 digits: Python does not write it, nor read it."""
UNSOUND = (
    f"must hold no NaN, Infinity, half a character, number of more than 4,300 digits or more than {MAX_DEPTH} levels "
    "of nesting"
)
"""What `is_sound` asks of a value, as a message says it."""
_HALF = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """Return the text with each half of a surrogate pair replaced by U+FFFD: UTF-8 cannot encode a half."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub("\ufffd", text)
    return text


def is_sound(value: object) -> bool:
    """Whether numbers are finite, text is whole characters, and no more than MAX_DEPTH levels are nested.

    Python's json also reads NaN, Infinity and halves of surrogate pairs, and nests as deep as the stack allows. A whole
    number of more than 4,300 digits, which only Python's own code can make, is not sound: it cannot be written.
    """
    level: list[object] = [value]
    for depth in range(MAX_DEPTH + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                if not (item.isascii() or whole_characters(item) is item):
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
