"""A text that the parsers of call formats read once, from its start to its end."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from agentgym.chat.formats.calls import joined, json_at, raw_call
from agentgym.chat.formats.response_format import Reading
from agentgym.types.json_values import MAX_DEPTH
from agentgym.types.messages import ToolCall


class MalformedCall(ValueError):
    """Raised by a parser if a text begins like a call of its format, and isn't one."""


_BLANKS = re.compile(r"\s*")


class Cursor:
    """A text, and the index at which it is read on. A method that doesn't find what it looks for leaves the index."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def skip(self) -> None:
        """Move past whitespace."""
        found = _BLANKS.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, mark: str) -> bool:
        """Move past whitespace and then past a mark. Return whether it is there."""
        self.skip()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Move past whitespace and then past a pattern. Return what it matched, or None."""
        self.skip()
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def expect(self, mark: str) -> None:
        """Move past whitespace and a mark.

        Raises:
            MalformedCall: If the mark isn't there.
        """
        if not self.take(mark):
            self.fail()

    def close(self, mark: str) -> None:
        """Move past whitespace and a mark, which may be missing at the end of the text.

        Raises:
            MalformedCall: If something else is there.
        """
        if not self.take(mark) and self.at < len(self.text):
            self.fail()

    def until(self, mark: str) -> str:
        """Move past the next occurrence of a mark, and return the text before it.

        Raises:
            MalformedCall: If the mark doesn't occur.
        """
        found = self.text.find(mark, self.at)
        if found < 0:
            self.fail()
        read, self.at = self.text[self.at : found], found + len(mark)
        return read

    def until_before(self, mark: str, behind: re.Pattern[str]) -> str:
        """Move past the next occurrence of a mark that is followed by a pattern, and return the text before it.

        Raises:
            MalformedCall: If there is none.
        """
        start, found = self.at, self.text.find(mark, self.at)
        while found >= 0:
            end = found + len(mark)
            if behind.match(self.text, end):
                self.at = end
                return self.text[start:found]
            found = self.text.find(mark, end)
        self.fail()

    def json(self) -> Any:
        """Move past whitespace and a JSON value, and return the value.

        Raises:
            MalformedCall: If there is none.
        """
        ok, value, end = json_at(self.text, self.at)
        if not ok:
            self.fail()
        self.at = end
        return value

    def put(self, members: dict[str, Any], name: str, value: Any) -> None:
        """Add a member to an object.

        Raises:
            MalformedCall: If the object already has this name.
        """
        if name in members:
            self.fail()
        members[name] = value

    def named(self, name: str) -> str:
        """Return the name of a call.

        Raises:
            MalformedCall: If it is empty.
        """
        if not name:
            self.fail()
        return name

    def fail(self) -> NoReturn:
        """Raise MalformedCall, which says at which character."""
        raise MalformedCall(f"at character {self.at}")


def read_blocks(text: str, opener: str, block: Callable[[Cursor], Sequence[ToolCall]]) -> Reading:
    """Read the calls of a text that has them in blocks. If one isn't sound, the whole text is one malformed call.

    Args:
        text: The text of a turn, without its reasoning.
        opener: The mark with which a block opens.
        block: Reads the rest of a block from a cursor, past its end.
    """
    cursor, pieces, calls = Cursor(text), list[str](), list[ToolCall]()
    try:
        while (found := text.find(opener, cursor.at)) >= 0:
            pieces.append(text[cursor.at : found])
            cursor.at = found + len(opener)
            calls += block(cursor)
    except ValueError:  # A malformed call, or a number of too many digits.
        return Reading("", [raw_call(text)])
    return Reading(joined([*pieces, text[cursor.at :]]), calls)


def deeper(cursor: Cursor, depth: int) -> int:
    """Return the depth of a value inside a value.

    Raises:
        MalformedCall: If that is too deep.
    """
    if depth >= MAX_DEPTH:
        cursor.fail()
    return depth + 1
