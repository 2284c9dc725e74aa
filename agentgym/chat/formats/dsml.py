# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""DeepSeek V3.2 and V4: DSML, in which each argument's tag says whether the value is text or JSON."""

import re
from functools import partial
from typing import Any

from agentgym.chat.formats.calls import json_at, made_call
from agentgym.chat.formats.cursor import Cursor, read_blocks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

_BLOCK = re.compile(r"(function_calls|tool_calls)>")
_INVOKE = re.compile(r"<｜DSML｜invoke\s+name=\"([^\"<>\n]+)\">")
_PARAMETER = re.compile(r"<｜DSML｜parameter\s+name=\"([^\"<>\n]+)\"\s+string=\"(true|false)\">")
_BEHIND = re.compile(r"\s*(?:<｜DSML｜parameter\s|</｜DSML｜invoke>)")


def _read(text: str, tools: Tools) -> Reading:
    return read_blocks(text, "<｜DSML｜", partial(_block, tools))


def _block(tools: Tools, cursor: Cursor) -> list[ToolCall]:
    block = cursor.match(_BLOCK)
    if block is None:
        cursor.fail()
    calls = []
    while name := cursor.match(_INVOKE):
        arguments = dict[str, Any]()
        while parameter := cursor.match(_PARAMETER):
            value = cursor.until_before("</｜DSML｜parameter>", _BEHIND)
            cursor.put(arguments, parameter[1], value if parameter[2] == "true" else _json(cursor, value))
        cursor.expect("</｜DSML｜invoke>")
        calls.append(made_call(name[1], arguments, tools))
    cursor.close(f"</｜DSML｜{block[1]}>")
    if not calls:
        cursor.fail()
    return calls


def _json(cursor: Cursor, text: str) -> Any:
    ok, value, end = json_at(text, 0)
    if not ok or text[end:].strip():
        cursor.fail()
    return value


def _format(name: str, block: str) -> ResponseFormat:
    return ResponseFormat(
        name=name,
        marks=("<｜DSML｜", block),
        example=f'<｜DSML｜{block}>\n<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="KEY" string="true">VALUE'
        f"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{block}>",
        call_marks=((f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"), ("<｜DSML｜", "")),
        read=_read,
    )


DSML = _format("dsml", "function_calls")
"""DeepSeek V3.2."""
DSML_V4 = _format("dsml_v4", "tool_calls")
"""DeepSeek V4. The block of calls has another name."""
