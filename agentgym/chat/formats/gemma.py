"""Gemma 4: `call:look{at:3,what:<|"|>a b<|"|>}`, with bare names and texts between marks of their own."""

import re
from functools import partial
from typing import Any

from agentgym.chat.formats.calls import made_call
from agentgym.chat.formats.cursor import Cursor, deeper, read_blocks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

CALL = ("<|tool_call>", "<tool_call|>")
ANSWER = "<|tool_response>"
"""The mark with which the answer to a call opens. The model writes it after its last call, and stops."""
QUOTE = '<|"|>'
_NAME = re.compile(r"call:([^\s{}]+)")
_KEY = re.compile(r"[^\s:,{}\[\]<][^:,{}\[\]]*")
_PLAIN = re.compile(r"(?:-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)")


def _read(text: str, tools: Tools) -> Reading:
    content, calls, _ = read_blocks(text, CALL[0], partial(_call, tools))
    return Reading(content.removesuffix(ANSWER).rstrip() if calls else content, calls)


def _call(tools: Tools, cursor: Cursor) -> list[ToolCall]:
    name = cursor.match(_NAME)
    if name is None:
        cursor.fail()
    cursor.expect("{")
    call = made_call(name[1], _object(cursor, 0), tools)
    cursor.close(CALL[1])
    return [call]


def _object(cursor: Cursor, depth: int) -> dict[str, Any]:
    """Read the members of an object and the brace after them."""
    members: dict[str, Any] = {}
    if cursor.take("}"):
        return members
    while True:
        key = _key(cursor)
        cursor.expect(":")
        cursor.put(members, key, _value(cursor, depth))
        if cursor.take("}"):
            return members
        cursor.expect(",")


def _key(cursor: Cursor) -> str:
    if cursor.take(QUOTE):
        return cursor.until(QUOTE)
    key = cursor.match(_KEY)
    if key is None:
        cursor.fail()
    return key[0].rstrip()


def _value(cursor: Cursor, depth: int) -> Any:
    if cursor.take(QUOTE):
        return cursor.until(QUOTE)
    if cursor.take("{"):
        return _object(cursor, deeper(cursor, depth))
    if cursor.take("["):
        return _list(cursor, deeper(cursor, depth))
    at = cursor.at
    if cursor.match(_PLAIN) is None:
        cursor.fail()
    cursor.at = at
    return cursor.json()


def _list(cursor: Cursor, depth: int) -> list[Any]:
    """Read the items of a list and the bracket after them."""
    items: list[Any] = []
    if cursor.take("]"):
        return items
    while True:
        items.append(_value(cursor, depth))
        if cursor.take("]"):
            return items
        cursor.expect(",")


GEMMA = ResponseFormat(
    name="gemma",
    marks=CALL[:1],
    example=f"{CALL[0]}call:NAME{{KEY:{QUOTE}VALUE{QUOTE}}}{CALL[1]}",
    call_marks=(CALL,),
    read=_read,
    reasoning=(("<|channel>thought", "<channel|>"),),
)
