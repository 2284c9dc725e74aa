"""Llama 3's format: {"name": .., "parameters": ..}, with or without <|python_tag|> before it. Other JSON is text."""

import re

from agentgym.chat.formats.calls import joined, json_at, made_call, raw_call
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

_TAG = "<|python_tag|>"
_BEGIN = re.compile(r'\{\s*+"(?:name|type|function|parameters|arguments)"\s*+:')
"""The beginning of a JSON object that may be a call."""
_CALL = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"[^"]*+"\s*+,\s*+"(?:parameters|arguments)"\s*+:'
)
"""The beginning of a JSON object that can only be a call."""
_AROUND = re.compile(r"<\|(?:python_tag|eom_id|eot_id)\|>|^[\s;,\[\]]++\Z")
"""What is no content beside a call: the format's marks, and what separates calls."""


def _read(text: str, tools: Tools) -> Reading:
    """Return the calls. Without tools, only an object after <|python_tag|> is a call."""
    if not tools and _TAG not in text:
        return Reading(text.strip(), [])
    calls: list[ToolCall] = []
    pieces: list[str] = []
    end = at = 0
    while (begin := _BEGIN.search(text, at)) is not None:
        ok, value, at = json_at(text, begin.start())
        if not ok and _CALL.search(text, begin.start(), at):  # It may be part of the broken object.
            return Reading(text, [*calls, raw_call(text[begin.start() :].strip())])
        at = max(at, begin.end())
        call = _call(value, tools)
        if call is not None:
            pieces.append(text[end : begin.start()])
            calls.append(call)
            end = at
    pieces.append(text[end:])
    return Reading(joined([_AROUND.sub("", piece) for piece in pieces] if calls else pieces), calls)


def _call(value: object, tools: Tools) -> ToolCall | None:
    """Return the call that a JSON value describes, or None if it is no call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((key for key in ("parameters", "arguments") if key in value), None)
    return None if key is None else made_call(value["name"], value[key], tools)


LLAMA = ResponseFormat(
    name="llama",
    marks=("<|start_header_id|>", "<|eot_id|>"),
    example='{"name": "NAME", "parameters": {"KEY": "VALUE"}}',
    call_marks=((_TAG, ""),),
    call_starts=('{"name"', '{"type"', '{"parameters"'),
    read=_read,
)
