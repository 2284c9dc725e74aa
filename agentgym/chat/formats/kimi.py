"""Kimi K2: a section of calls, each with an id such as `functions.look:0` and its arguments as JSON."""

import re
from functools import partial

from agentgym.chat.formats.calls import made_call
from agentgym.chat.formats.cursor import Cursor, read_blocks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
ARGUMENTS = "<|tool_call_argument_begin|>"
_NUMBER = re.compile(r":\d+$")


def _read(text: str, tools: Tools) -> Reading:
    return read_blocks(text, SECTION[0], partial(_section, tools))


def _section(tools: Tools, cursor: Cursor) -> list[ToolCall]:
    calls = []
    while cursor.take(CALL[0]):
        call_id = cursor.until(ARGUMENTS).strip()
        name = _NUMBER.sub("", call_id).removeprefix("functions.")
        calls.append(made_call(cursor.named(name), cursor.json(), tools, call_id=call_id))
        cursor.close(CALL[1])
    cursor.close(SECTION[1])
    if not calls:
        cursor.fail()
    return calls


KIMI = ResponseFormat(
    name="kimi",
    marks=SECTION[:1],
    example=f'{SECTION[0]}{CALL[0]}functions.NAME:0{ARGUMENTS}{{"KEY": "VALUE"}}{CALL[1]}{SECTION[1]}',
    call_marks=(SECTION, CALL),
    read=_read,
)
