# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""Response formats of the common model families, as data: how reasoning and tool calls are written.

A tokenizer's own `response_template` takes precedence. If it has none, its chat template is recognized by the
delimiters that it writes, and the response format with these delimiters is used. Formats are written for transformers'
`parse_response`. A malformed call keeps its text in every format, so that the error can be reported to the model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.chat.parsing import raw_call
from agentgym.types.messages import Message

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_JSON = {"content": "json", "content_args": {"allow_non_json": True}}
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_TEXT = {"content": "text"}
_ASSISTANT = {"role": "assistant"}


def _response_format(start_anchor: str, *, reasoning: dict[str, Any] | None = None, **calls: Any) -> dict[str, Any]:
    fields = ({} if reasoning is None else {"reasoning_content": reasoning}) | {"tool_calls": calls, "content": _TEXT}
    return {"defaults": _ASSISTANT, "start_anchor": start_anchor, "fields": fields}


HERMES = _response_format(
    "<|im_start|>assistant\n",
    reasoning=_THINK,
    open="<tool_call>",
    close_pattern=r"</tool_call>\s*",
    repeats=True,
    transform={"type": "function", "function": "{content}"},
    **_JSON,
)
"""Hermes, Qwen 2.5 and 3: {"name": .., "arguments": ..} between <tool_call> tags."""

QWEN_CODER = _response_format(
    "<|im_start|>assistant\n",
    reasoning=_THINK,
    open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>\s*",
    repeats=True,
    content="xml-inline",
    content_args={
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
        "value_parser": {"name": "text", "args": {"strip": False}},
    },
    transform=_CALL,
)
"""Qwen3-Coder: <function=name> and <parameter=key> tags. Values are text, cast by the tool's schema."""

LLAMA = _response_format(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    open_pattern=r"<\|python_tag\|>\s*(?=\{)|"
    r"(?=\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:parameters|arguments)\"\s*:)",
    close_pattern=r"\s*(?:<\|eom_id\|>|<\|eot_id\|>)",
    repeats=True,
    content="json",
    transform={
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
    },
)
"""Llama 3: one {"name": .., "parameters": ..}, with or without <|python_tag|> before it. Other JSON is text."""

MISTRAL = _response_format(
    "[/INST]",
    reasoning={"open": "[THINK]", "close": "[/THINK]", "content": "text"},
    open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\])?"
    r"(?P<id>(?:(?<=\[CALL_ID\])\w+)?)\s*\[ARGS\]",
    close_pattern=r"\s*(?=\[TOOL_CALLS\])",
    repeats=True,
    transform=_CALL | {"id": "{id}"},
    **_JSON,
)
"""Mistral since tokenizer v11: [TOOL_CALLS]name[ARGS]{..} for each call. v11 also has [CALL_ID]id."""

MISTRAL_LIST = _response_format(
    "[/INST]",
    open_pattern=r"\[TOOL_CALLS\]\s*(?=\[)",
    content="json",
    transform={"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    transform_each=True,
)
"""Mistral up to tokenizer v7: [TOOL_CALLS] and one list of {"name": .., "arguments": .., "id": ..}."""

DEEPSEEK = _response_format(
    "<｜Assistant｜>",
    reasoning=_THINK,
    open_pattern=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    r"(?P<name>[^\s<｜]+)(?:<｜tool▁sep｜>|\n```json\n)",
    close_pattern=r"(?:\n```)?<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
    repeats=True,
    transform=_CALL,
    **_JSON,
)
"""DeepSeek V3 and R1 (a fenced JSON block after the name) and V3.1 (bare JSON)."""

GLM = _response_format(
    "<|assistant|>",
    reasoning=_THINK,
    open_pattern=r"<tool_call>\s*(?P<name>[^\s<]+)\s*",
    close_pattern=r"</tool_call>\s*",
    repeats=True,
    content="xml-inline",
    content_args={
        # Possessive, so that a run of whitespace is read once, no matter how long it is.
        "tag_pattern": r"<arg_key>\s*+(?P<key>[^\s<]++(?:\s[^\s<]++)*+)\s*+</arg_key>\s*+"
        r"<arg_value>(?P<value>.*?)</arg_value>",
        "value_parser": {"name": "text", "args": {"strip": False}},
    },
    transform=_CALL,
)
"""GLM 4.5 and later: the name, then <arg_key> and <arg_value> pairs. Values are text, cast by the tool's schema."""

_START = r"(?:<\|start\|>assistant)?"
_TO = r" to=(?:functions\.)?(?P<name>[\w.-]+)"
_FORMAT = r"\s*(?:<\|constrain\|>)?\s*\w*<\|message\|>"

HARMONY: dict[str, Any] = {
    "defaults": _ASSISTANT,
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": _START + r"<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "\n",
            **_TEXT,
        },
        "tool_calls": {
            "open_pattern": rf"{_START}(?:{_TO}\s*<\|channel\|>(?:commentary|analysis)"
            rf"|<\|channel\|>(?:commentary|analysis){_TO}){_FORMAT}",
            "close_pattern": r"<\|call\|>|<\|end\|>",
            "repeats": True,
            "transform": _CALL,
            **_JSON,
        },
        "content": {
            "open_pattern": rf"{_START}<\|channel\|>(?:final|commentary){_FORMAT}",
            "close_pattern": r"<\|return\|>|<\|end\|>",
            "repeats": True,
            "join": "\n",
            **_TEXT,
        },
    },
}
"""gpt-oss: channels for analysis, calls, text before a call, and the final answer.

The recipient of a call, ` to=NAME`, is written after the channel or before it, next to the role. The turn's opening
ends within the role.
"""

RESPONSE_FORMATS: Mapping[str, dict[str, Any]] = {
    "harmony": HARMONY,
    "qwen_coder": QWEN_CODER,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "mistral": MISTRAL,
    "mistral_list": MISTRAL_LIST,
    "llama": LLAMA,
    "hermes": HERMES,
}
"""The formats by name, those with the most specific delimiters first."""

MARKS: Mapping[str, tuple[str, ...]] = {
    "harmony": ("<|channel|>", "<|message|>"),
    "qwen_coder": ("<function=", "<parameter="),
    "glm": ("<arg_key>", "<tool_call>"),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral_list": ("[TOOL_CALLS]",),
    "llama": ("<|start_header_id|>", "<|eot_id|>"),
    "hermes": ("<tool_call>",),
}
"""The delimiters by which each format is recognized. A chat template of that format contains all of them."""


def response_format_of(chat_template: str) -> str | None:
    """Return the name of the format whose delimiters a chat template contains, or None if no format matches."""
    return next((name for name, marks in MARKS.items() if all(mark in chat_template for mark in marks)), None)


MAX_TAGS = 64
"""Number of argument tags up to which a reply is parsed even if the tags aren't in the expected order."""
_TAGS: Mapping[str, tuple[str, ...]] = {
    "qwen_coder": ("<parameter=", "</parameter>"),
    "glm": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}
"""The tags of an argument, in order, for each format whose arguments are found with a pattern."""


def is_tangled(name: str | None, text: str) -> bool:
    """Return whether a reply has more than MAX_TAGS argument tags, and they are not in the expected order.

    Such a reply isn't parsed. For each argument, the pattern searches for the end tag up to the end of the text, so
    2,000 unclosed arguments would take seconds to hours.
    """
    tags = _TAGS.get(name or "", ())
    found = re.findall("|".join(tags), text) if tags else []
    if len(found) <= MAX_TAGS:
        return False
    return len(found) % len(tags) > 0 or any(tag != tags[i % len(tags)] for i, tag in enumerate(found))


_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The form of a call id that Mistral's templates accept."""


def may_call(name: str | None, text: str, tools: Sequence[dict[str, Any]]) -> bool:
    """Return whether a reply in this format can contain a call. Llama's bare JSON is a call only if there are tools."""
    return name != "llama" or bool(tools) or "<|python_tag|>" in text


def completed(name: str | None, text: str, message: Message) -> Message:
    """Return the message with corrections for what `parse_response` misreads in this format.

    In `mistral_list`, the call ids are added. In `glm` and `qwen_coder`, a truncated call becomes a malformed one. In
    `harmony`, an empty message gets the whole text as its content.

    Args:
        name: The name of the format.
        text: The text that was parsed.
        message: The message that `parse_response` returned.
    """
    if name == "mistral_list":
        _take_ids(text, message)
    elif name in ("glm", "qwen_coder") and "tool_calls" in message and _is_cut(RESPONSE_FORMATS[name], text):
        return Message(role="assistant", content=text, tool_calls=[raw_call(text)])
    elif name == "harmony" and text.strip() and message.keys() <= {"role", "content"} and not message["content"]:
        return Message(role="assistant", content=text)
    return message


def _take_ids(text: str, message: Message) -> None:
    """Add the call ids that the model wrote to the message's calls, except ids that Mistral's templates reject."""
    try:
        made = json.loads(text.partition("[TOOL_CALLS]")[2])
    except (ValueError, RecursionError):
        return
    for call, item in zip(message.get("tool_calls", ()), made, strict=False):
        if isinstance(item, dict) and isinstance(item.get("id"), str) and _ID.fullmatch(item["id"]):
            call["id"] = item["id"]


def _is_cut(response_format: dict[str, Any], text: str) -> bool:
    """Return whether a call is truncated: it contains text other than complete pairs of an argument's name and value.

    Without this check, such an incomplete pair would be dropped silently.
    """
    calls = response_format["fields"]["tool_calls"]
    closed = re.compile(calls["close_pattern"])
    for opened in re.finditer(calls["open_pattern"], text):
        end = closed.search(text, opened.end())
        body = text[opened.end() : end.start() if end else len(text)]
        rest = re.sub(calls["content_args"]["tag_pattern"], "", body, flags=re.DOTALL)
        if rest.replace("</function>", "").strip():
            return True
    return False
