"""Calls as Python writes them: `[look(at=3, what='a b')]`, in marks (LFM2) or as the whole reply (Llama 4)."""

import re
from functools import partial
from typing import Any

from agentgym.chat.formats.calls import made_call
from agentgym.chat.formats.cursor import Cursor, deeper, read_blocks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

LIST = ("<|tool_call_start|>", "<|tool_call_end|>")
_NAME = re.compile(r"([^\s()\[\]{},='\"<>:]+)\s*\(")
_KEY = re.compile(r"([^\s()\[\]{},='\"<>:]+)\s*=")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_WORD = re.compile(r"(?:True|true|False|false|None|null)\b")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_ENDS = re.compile(r"\s*(?:[,)\]}:]|$)")
"""What follows a text. Another quote is part of the text, since some templates don't escape it."""
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[\\'\"abfnrtv\n])")
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_SPECIAL = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "'\""}


def _read(text: str, tools: Tools) -> Reading:
    return read_blocks(text, LIST[0], partial(_block, tools))


def _block(tools: Tools, cursor: Cursor) -> list[ToolCall]:
    calls = read_list(cursor, tools)
    cursor.close(LIST[1])
    return calls


def read_list(cursor: Cursor, tools: Tools) -> list[ToolCall]:
    """Read a list of calls.

    Raises:
        MalformedCall: If there is none.
    """
    cursor.expect("[")
    calls = []
    while True:
        name = cursor.match(_NAME)
        if name is None:
            cursor.fail()
        calls.append(made_call(name[1], _arguments(cursor), tools))
        if cursor.take("]"):
            return calls
        cursor.expect(",")


def _arguments(cursor: Cursor) -> dict[str, Any]:
    """Read the arguments of a call and the parenthesis after them."""
    arguments: dict[str, Any] = {}
    while not cursor.take(")"):
        key = cursor.match(_KEY)
        if key is None:
            cursor.fail()
        cursor.put(arguments, key[1], _value(cursor, 0))
        if not cursor.take(","):
            cursor.expect(")")
            break
    return arguments


def _value(cursor: Cursor, depth: int) -> Any:
    for quote in "'\"":
        if cursor.take(quote):
            return _text(cursor, quote)
    if cursor.take("["):
        return _list(cursor, deeper(cursor, depth))
    if cursor.take("{"):
        return _dict(cursor, deeper(cursor, depth))
    if word := cursor.match(_WORD):
        return _WORDS[word[0]]
    if number := cursor.match(_NUMBER):
        return int(number[0]) if number[0].lstrip("-").isdigit() else float(number[0])
    cursor.fail()


def _text(cursor: Cursor, quote: str) -> str:
    """Read a text up to the quote that ends it, and return it without escapes."""
    for found in _SPECIAL[quote].finditer(cursor.text, cursor.at):
        if found[0] == quote and _ENDS.match(cursor.text, found.end()):
            read, cursor.at = cursor.text[cursor.at : found.start()], found.end()
            return _ESCAPE.sub(_unescaped, read) if "\\" in read else read
    cursor.fail()


def _unescaped(escape: re.Match[str]) -> str:
    body = escape[1]
    return chr(int(body[1:], 16)) if body[0] in "uUx" else _ESCAPED.get(body, body)


def _list(cursor: Cursor, depth: int) -> list[Any]:
    """Read the items of a list and the bracket after them."""
    items: list[Any] = []
    while not cursor.take("]"):
        items.append(_value(cursor, depth))
        if not cursor.take(","):
            cursor.expect("]")
            break
    return items


def _dict(cursor: Cursor, depth: int) -> dict[str, Any]:
    """Read the members of a dict and the brace after them."""
    members: dict[str, Any] = {}
    while not cursor.take("}"):
        key = _value(cursor, depth)
        if not isinstance(key, str):
            cursor.fail()
        cursor.expect(":")
        cursor.put(members, key, _value(cursor, depth))
        if not cursor.take(","):
            cursor.expect("}")
            break
    return members


LFM2 = ResponseFormat(
    name="lfm2",
    marks=LIST[:1],
    example=f"{LIST[0]}[NAME(KEY='VALUE')]{LIST[1]}",
    call_marks=(LIST,),
    read=_read,
)
"""LFM2 and LFM2.5: the calls stand between marks."""
