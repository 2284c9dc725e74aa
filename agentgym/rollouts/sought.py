"""Words that a chat template looks for in contents, read off its source.

A template that opens a turn otherwise where a message holds "/no_think" cannot be remembered by the shape of a turn
alone: which of its words were seen is part of what is remembered.
"""

import re
from collections.abc import Iterable

_QUOTED = r"(['\"])((?:(?!\1).)+)\1"
_IN = re.compile(_QUOTED + r"\s+(?:not\s+)?in\b")
_ASKED = re.compile(r"\.(?:startswith|endswith|split|rsplit|replace|find|index|count|partition)\(\s*" + _QUOTED)
_KEYS = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name", "function"}
    | {"arguments", "parameters", "id", "type", "text", "image", "image_url", "video", "audio", "properties", "items"}
    | {"required", "description", "return", "enum"}
)
"""Names of fields: a template that asks whether a message has one does not look into its text."""


def sought_words(template: str) -> set[str]:
    """What the template's source compares parts of a text with; the names of a message's fields are left out."""
    found = {match[2] for pattern in (_IN, _ASKED) for match in pattern.finditer(template)}
    words = {word.replace("\\n", "\n") for word in found - _KEYS}
    return {word for word in words if word.strip()}


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds each of the words; None where there are none."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
