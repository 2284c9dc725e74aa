"""The content of a reply: text, or a list of parts of which some are text and some are reasoning."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_TEXT = ("text", "output_text", "refusal")
"""The types of parts that are the reply's text."""
_REASONING = ("thinking", "reasoning", "redacted_thinking")
"""The types of parts that are reasoning. An encrypted one has no text."""


class Parts(NamedTuple):
    """The parts of a reply's content."""

    text: str
    reasoning: str
    unread: list[str]
    """The types of the other parts."""


def parts_read(content: str | Sequence[Any] | None) -> Parts:
    """Return the text and the reasoning in a reply's content.

    Args:
        content: A text, or a list of parts. A part is a text or an object with a `type`. Its text is in the field
            "text" or in the field with the name of its type, as text or as another list of parts.
    """
    text, reasoning, unread = list[str](), list[str](), list[str]()
    for part in [content] if isinstance(content, str) else content or ():
        kind = "text" if isinstance(part, str) else str(part.get("type")) if isinstance(part, Mapping) else "unknown"
        if kind in _TEXT:
            text.append(_text_of(part))
        elif kind in _REASONING:
            reasoning.append(_text_of(part))
        else:
            unread.append(kind)
    return Parts("".join(text), "".join(reasoning), unread)


def _text_of(part: Any) -> str:
    """Return the text of a part: pieces of one text follow each other without a separator."""
    if not isinstance(part, Mapping):
        return str(part)
    said = part.get("text") or part.get(str(part.get("type"))) or ""
    if isinstance(said, list):
        return "".join(map(_text_of, said))
    return str(said)
