"""MiniMax: <invoke> with <parameter> tags (M2), or tags with the arguments' names, which may nest (M3)."""

import re
from functools import partial
from typing import Any

from agentgym.chat.formats.calls import Tags, cast_tags, made_call
from agentgym.chat.formats.cursor import Cursor, deeper, read_blocks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

CALLS = ("<minimax:tool_call>", "</minimax:tool_call>")
_INVOKE = re.compile(r"<invoke\s+name=\"([^\"<>\n]+)\">")
_PARAMETER = re.compile(r"<parameter\s+name=\"([^\"<>\n]+)\">")
_BEHIND = re.compile(r"\s*(?:<parameter\s+name=|</invoke>)")

SPACE = "]<]minimax[>["
"""What M3 writes before each tag."""
CALLS_M3 = (f"{SPACE}<tool_call>", f"{SPACE}</tool_call>")
_INVOKE_M3 = re.compile(re.escape(SPACE) + r"<invoke\s+name=\"([^\"<>\n]+)\">")
_TAG_M3 = re.compile(re.escape(SPACE) + r"<([^\s<>/][^<>\n]*)>")


def _read(text: str, tools: Tools) -> Reading:
    return read_blocks(text, CALLS[0], partial(_block, tools))


def _block(tools: Tools, cursor: Cursor) -> list[ToolCall]:
    calls = []
    while name := cursor.match(_INVOKE):
        arguments = dict[str, Any]()
        while parameter := cursor.match(_PARAMETER):
            cursor.put(arguments, parameter[1], cursor.until_before("</parameter>", _BEHIND))
        cursor.expect("</invoke>")
        calls.append(made_call(name[1], arguments, tools, text_values=True))
    cursor.close(CALLS[1])
    if not calls:
        cursor.fail()
    return calls


def _read_m3(text: str, tools: Tools) -> Reading:
    return read_blocks(text, CALLS_M3[0], partial(_block_m3, tools))


def _block_m3(tools: Tools, cursor: Cursor) -> list[ToolCall]:
    calls = []
    while name := cursor.match(_INVOKE_M3):
        schema = next(
            (each["function"].get("parameters") for each in tools if each["function"]["name"] == name[1]), None
        )
        arguments = cast_tags(_tags(cursor, "invoke", 0), _as_object(schema), schema)
        calls.append(made_call(name[1], arguments, tools))
    cursor.close(CALLS_M3[1])
    if not calls:
        cursor.fail()
    return calls


def _as_object(schema: object) -> dict[str, Any]:
    return (schema if isinstance(schema, dict) else {}) | {"type": "object"}


def _tags(cursor: Cursor, parent: str, depth: int) -> Tags:
    """Read the tags inside a tag, and its end."""
    members = []
    while tag := cursor.match(_TAG_M3):
        members.append((tag[1], _value(cursor, tag[1], depth)))
    cursor.expect(f"{SPACE}</{parent}>")
    return Tags(members)


def _value(cursor: Cursor, name: str, depth: int) -> Tags | str:
    """Read the value of a tag, which is text or other tags, and the tag's end."""
    start, end = cursor.at, f"</{name}>"
    text = cursor.until(SPACE)
    if cursor.text.startswith(end, cursor.at):
        cursor.at += len(end)
        return text
    cursor.at = start
    return _tags(cursor, name, deeper(cursor, depth))


MINIMAX_M2 = ResponseFormat(
    name="minimax",
    marks=(CALLS[0], "<invoke name="),
    example=f'{CALLS[0]}\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n{CALLS[1]}',
    call_marks=(CALLS,),
    read=_read,
)
MINIMAX_M3 = ResponseFormat(
    name="minimax_m3",
    marks=(SPACE, "<invoke name="),
    example=f'{CALLS_M3[0]}\n{SPACE}<invoke name="NAME">{SPACE}<KEY>VALUE{SPACE}</KEY>{SPACE}</invoke>\n{CALLS_M3[1]}',
    call_marks=(CALLS_M3,),
    read=_read_m3,
)
