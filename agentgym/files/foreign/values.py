"""Checks of untrusted values, since JSON allows larger numbers than arrays and files can hold."""

import math
from collections.abc import Mapping
from typing import Any

LARGEST = 2**63 - 1
"""The largest integer that SQLite and arrays can hold."""


def whole(value: Any, name: str) -> int:
    """Return the value if it is a 64-bit integer, otherwise raise ValueError with its name."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST:
        raise ValueError(f"{name}: must be a 64-bit integer, got {_shown(value)}")
    return value


def number(value: Any, name: str, *, finite: bool = True) -> float:
    """Return the value if it is a number that fits in a float, otherwise raise ValueError with its name.

    Args:
        value: The value to check.
        name: The value's name in the message.
        finite: Whether NaN and infinity are refused.
    """
    right = isinstance(value, int | float) and (isinstance(value, float) or abs(value) <= LARGEST)
    if not right or (finite and not math.isfinite(value)):
        kind = "a finite number" if finite else "a number"
        raise ValueError(f"{name}: must be {kind}, got {_shown(value)}")
    return value  # type: ignore[no-any-return]


def numbers(found: Any, name: str) -> Mapping[str, float]:
    """Return the value if it is an object of numbers, finite or not, otherwise raise ValueError with its name."""
    if not isinstance(found, dict):
        raise ValueError(f"{name}: must be an object, got {type(found).__name__}")
    for key, value in found.items():
        number(value, f"{name}.{key:.80}", finite=False)
    return found


def text_of(value: Any, name: str) -> str:
    """Return the value if it is text, otherwise raise ValueError with its name."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text, got {type(value).__name__}")
    return value


def messages_of(found: Any, name: str) -> tuple[Any, ...]:
    """Return a list of chat messages as a tuple without checking their content, or raise ValueError with its name."""
    if not isinstance(found, list):
        raise ValueError(f"{name}: must be a list, got {type(found).__name__}")
    for message in found:
        if not isinstance(message, dict):
            raise ValueError(f"{name}: a message must be an object, got {type(message).__name__}")
    return tuple(found)


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "an integer that does not fit in 64 bits"
    return f"{value!r:.80}" if isinstance(value, str | float | bool | None) else f"type {type(value).__name__}"
