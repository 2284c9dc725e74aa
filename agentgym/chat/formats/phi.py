"""Phi-4-mini with a template that shows tools: the word `functools`, and a list of {"name": .., "arguments": ..}."""

from functools import partial
from typing import Any

from agentgym.chat.formats.calls import call_of
from agentgym.chat.formats.cursor import Cursor, read_blocks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

MARK = "functools["


def _read(text: str, tools: Tools) -> Reading:
    return read_blocks(text, MARK, partial(_list, tools))


def _list(tools: Tools, cursor: Cursor) -> list[ToolCall]:
    cursor.at -= 1  # The mark ends with the list's bracket.
    listed = cursor.json()
    if not isinstance(listed, list) or not listed:
        cursor.fail()
    return [call_of(_with_arguments(item), tools) for item in listed]


def _with_arguments(item: Any) -> Any:
    """Return a call whose arguments may have the key "parameters" with the key "arguments"."""
    if isinstance(item, dict) and "parameters" in item and "arguments" not in item:
        return item | {"arguments": item["parameters"]}
    return item


FUNCTOOLS = ResponseFormat(
    name="functools",
    marks=(MARK,),
    example=f'{MARK}{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}]',
    call_marks=((MARK, ""),),
    read=_read,
)
