"""Parsing of a model's text into an assistant message: reasoning, content and tool calls. No function here raises.

A call that isn't valid JSON keeps the model's text as its `arguments`, so that a tool message can report the error.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from agentgym.types.json_values import MAX_DEPTH, is_sound, whole_characters
from agentgym.types.messages import Message, ToolCall


def _scan(**hooks: Any) -> Any:
    """Return the function with which a JSON decoder with these hooks reads a value.

    Calling it directly takes half as long as `json.loads`.
    """
    return vars(json.JSONDecoder(**hooks))["scan_once"]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


_scanned = _scan()
_scanned_finite = _scan(parse_float=_finite, parse_constant=_finite)
"""Reads a JSON value like `_scanned`, but rejects NaN and infinities, which aren't standard JSON, and numbers that
overflow to infinity.
"""
_BLANKS = " \t\n\r"
"""The characters that JSON allows as whitespace around a value."""
_CAST: dict[type, str] = {str: "string", list: "array"}
"""Python types of arguments that transformers' parser casts if the tool's schema has another type for them, each with
the schema type for which no cast is needed.
"""


def plain_hermes(text: str, tools: Sequence[dict[str, Any]]) -> Message | None:
    """Parse text followed by complete, valid calls in the Hermes format, at a tenth of the full parser's cost.

    Returns:
        The message, or None if the full parser is needed: for reasoning, an unclosed tag, text after a call, an
        invalid call, or an argument that transformers' parser would cast to the type in its schema.
    """
    if "think>" in text:
        return None
    content, *bodies = text.split("<tool_call>")
    if not bodies:
        return {"role": "assistant", "content": text.strip()} if "tool_call>" not in text else None
    calls: list[ToolCall] = []
    for body in bodies:
        written, close, behind = body.partition("</tool_call>")
        made = _loaded(written, _scanned_finite) if close and not behind.strip() else None
        if type(made) is not dict or len(made) != 2:
            return None
        name, arguments = made.get("name"), made.get("arguments")
        if type(name) is not str or type(arguments) is not dict:
            return None
        # All numbers are finite here. Only a "\\u" escape can produce a lone surrogate, and only many brackets can
        # nest deeply.
        if (written.count("{") + written.count("[") > MAX_DEPTH or "\\u" in written) and not _is_sound(made):
            return None
        for tool in tools:
            function = tool["function"]
            if function["name"] == name:
                name = function["name"]  # the schema's string object, which all calls of the tool then share
                if _needs_casts(arguments, function):
                    return None
        calls += ({"type": "function", "function": {"name": name, "arguments": arguments}},)
    return {"role": "assistant", "content": content.strip(), "tool_calls": calls[:]}  # A slice has no spare capacity.


def _needs_casts(arguments: dict[str, Any], function: dict[str, Any]) -> bool:
    """Return whether an argument is a string or a list, but the function's schema has another type for it."""
    properties: dict[str, Any] | None = None
    for key, value in arguments.items():
        kind = _CAST.get(type(value))
        if kind is not None:
            if properties is None:
                properties = function.get("parameters", {}).get("properties", {})
            if key in properties and properties[key].get("type") != kind:
                return True
    return False


def parse_hermes(text: str) -> Message:
    """Parse a text with JSON calls between <tool_call> tags into an assistant message, without ever raising."""
    calls = [{"function": _loaded(body)} for body in _hermes_calls(text)]
    content = text.partition("<tool_call>")[0].strip() if calls else text
    return message_of(text, {"content": content, "tool_calls": calls})


def _hermes_calls(text: str) -> list[str]:
    """Return the text between each <tool_call> and the next </tool_call> or the end, at a fifth of a regex's cost."""
    bodies = []
    at = text.find("<tool_call>")
    while at >= 0:
        body, _, _ = text[at + len("<tool_call>") :].partition("</tool_call>")
        bodies.append(body.strip())
        at = text.find("<tool_call>", at + len("<tool_call>") + len(body))
    return bodies


def _loaded(body: str, scanned: Any = _scanned) -> object:
    body = body.strip(_BLANKS)
    try:
        made, end = scanned(body, 0)
    except (ValueError, RecursionError, StopIteration):
        return body
    return made if end == len(body) else body


def _is_sound(function: dict[str, Any]) -> bool:
    name: str = function["name"]
    return whole_characters(name) is name and is_sound(function["arguments"])


def raw_call(text: str) -> ToolCall:
    """Return a malformed call that keeps the model's text, for the tool message that reports the error."""
    return ToolCall(type="function", function={"name": "", "arguments": text})


def message_of(text: str, parsed: dict[str, Any]) -> Message:
    """Convert parsed fields to an assistant message. If a call is malformed, the whole `text` becomes the content."""
    calls = [_tool_call(call) for call in parsed.get("tool_calls") or ()]
    if any(isinstance(call["function"]["arguments"], str) for call in calls):
        return Message(role="assistant", content=text, tool_calls=calls)
    message = Message(role="assistant", content=parsed.get("content") or "")
    if parsed.get("reasoning_content"):
        message["reasoning_content"] = parsed["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(read: dict[str, Any]) -> ToolCall:
    function = read.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return raw_call(function if isinstance(function, str) else json.dumps(function))
    name, arguments = function["name"], function.get("arguments")
    if not isinstance(arguments, dict) or not _is_sound(function):
        name = whole_characters(name)
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = ToolCall(type="function", function={"name": name, "arguments": arguments})
    if isinstance(read.get("id"), str) and read["id"]:
        call["id"] = read["id"]
    return call
