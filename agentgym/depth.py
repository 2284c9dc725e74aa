"""How deep a JSON value is nested; what is deeper than any template can write is no tool call."""

from typing import Any

MAX_DEPTH = 100
"""Levels of lists and objects in a call's arguments."""


def is_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Whether the value holds more than `limit` levels of lists and dicts; it never recurses itself."""
    level = [value]
    for _ in range(limit):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value
    return [item for item in inner if isinstance(item, dict | list)]
