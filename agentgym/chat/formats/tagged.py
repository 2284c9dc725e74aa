"""Calls whose arguments are written between tags, as text: the reader that several families share.

A value may hold the tags of the format. A closing tag ends it only if the call can go on after it: with the next
argument, or with the end of the call. Of several, it is the last before the next call. If a value holds the opening
tag of an argument at the start of a line, its end can't be told from a missing closing tag, and the call is malformed.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentgym.chat.formats.calls import joined, made_call, raw_call
from agentgym.chat.formats.response_format import Reading, Tools
from agentgym.types.messages import ToolCall


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags of a format. Patterns must not match the same text in two ways, so that they are linear."""

    call: str
    """Pattern of the beginning of a call, up to its first argument, with the group `name`."""
    argument: str
    """Pattern of the beginning of an argument, up to its value, with the group `key`."""
    argument_mark: str
    """The text with which an argument begins."""
    value_end: str
    """The tag after a value."""
    call_end: str
    """Pattern of the end of a call, after its last argument. A text may also end without it."""
    trims: bool = False
    """Whether a line break at the start and at the end of a value belongs to the tags."""

    @cached_property
    def calls(self) -> re.Pattern[str]:
        """The pattern of the beginning of a call."""
        return re.compile(self.call, re.MULTILINE)

    @cached_property
    def first(self) -> re.Pattern[str]:
        """The pattern of the beginning of the first argument."""
        return re.compile(rf"\s*{self.argument}")

    @cached_property
    def next(self) -> re.Pattern[str]:
        """The pattern of the end of a value and the beginning of the next argument."""
        return re.compile(rf"{re.escape(self.value_end)}\s*{self.argument}")

    @cached_property
    def last(self) -> re.Pattern[str]:
        """The pattern of the end of the last value and of the call."""
        return re.compile(rf"{re.escape(self.value_end)}\s*(?:{self.call_end})")

    @cached_property
    def cut(self) -> re.Pattern[str]:
        """The pattern of the end of the last value at the end of the text."""
        return re.compile(rf"{re.escape(self.value_end)}\s*\Z")

    @cached_property
    def empty(self) -> re.Pattern[str]:
        """The pattern of the end of a call without arguments."""
        return re.compile(rf"\s*(?:{self.call_end}|\Z)")


class _Broken(Exception):
    """Raised for a call that can't be read."""


def read_tagged(text: str, tools: Tools, tags: Tags) -> Reading:
    """Return the calls in a text. If one of them is malformed, the whole text is one malformed call.

    None is made then, because a call may be part of the malformed call's value.

    Args:
        text: The text, without reasoning.
        tools: The schemas of the tools.
        tags: The tags of the format.
    """
    openings = list(tags.calls.finditer(text))
    if not openings:
        return Reading(text.strip(), [])
    pieces, calls = [text[: openings[0].start()]], list[ToolCall]()
    stops = [*(opening.start() for opening in openings[1:]), len(text)]
    try:
        for opening, stop in zip(openings, stops, strict=True):
            arguments, end = _arguments(text, opening.end(), stop, tags)
            calls.append(made_call(opening["name"].strip(), arguments, tools, text_values=True))
            pieces.append(text[end:stop])
    except _Broken:
        return Reading(text, [raw_call(text)])
    return Reading(joined(pieces), calls)


def _arguments(text: str, start: int, stop: int, tags: Tags) -> tuple[dict[str, Any], int]:
    """Return a call's arguments and its end.

    Args:
        text: The text.
        start: The place after the beginning of the call.
        stop: The place of the next call, or the end of the text.
        tags: The tags of the format.

    Raises:
        _Broken: If the call can't be read.
    """
    first = tags.first.match(text, start, stop)
    if first is None:
        ended = tags.empty.match(text, start, stop)
        if ended is None:
            raise _Broken
        return {}, ended.end()
    heads = [first, *tags.next.finditer(text, first.end(), stop)]
    ending = _ending(text, heads[-1].end(), stop, tags)
    ends = [*(head.start() for head in heads[1:]), ending.start()]
    arguments: dict[str, Any] = {}
    for head, end in zip(heads, ends, strict=True):
        value, key = text[head.end() : end], head["key"].strip()
        if key in arguments or value.lstrip(" \t").startswith(tags.argument_mark) or f"\n{tags.argument_mark}" in value:
            raise _Broken
        arguments[key] = _trimmed(value) if tags.trims else value
    return arguments, ending.end()


def _ending(text: str, start: int, stop: int, tags: Tags) -> re.Match[str]:
    """Return the end of the last value: the last that ends the call, or else the one at the end of the text."""
    ends = list(tags.last.finditer(text, start, stop))
    found = ends[-1] if ends else tags.cut.search(text, start, stop)
    if found is None:
        raise _Broken
    return found


def _trimmed(value: str) -> str:
    value = value.removeprefix("\n")
    return value.removesuffix("\n")
