"""What a family's marks leave to be said after its template has read a reply: ids, cut calls, unmarked text."""

import json
import re
from collections.abc import Sequence
from typing import Any

from agentgym.rollouts.families import FAMILIES
from agentgym.rollouts.parsing import raw_call
from agentgym.types import Message

_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The ids that Mistral's templates take."""


def may_call(family: str | None, text: str, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the reply can hold a call: Llama's bare JSON is one only where tools are offered."""
    return family != "llama" or bool(tools) or "<|python_tag|>" in text


def completed(family: str | None, text: str, message: Message) -> Message:
    """The message with what its family needs besides; a call that was cut off is malformed and keeps its text."""
    if family == "mistral_list":
        _take_ids(text, message)
    elif family in ("glm", "qwen_coder") and "tool_calls" in message and _is_cut(FAMILIES[family], text):
        return Message(role="assistant", content=text, tool_calls=[raw_call(text)])
    elif family == "harmony" and text.strip() and message.keys() <= {"role", "content"} and not message["content"]:
        return Message(role="assistant", content=text)
    return message


def _take_ids(text: str, message: Message) -> None:
    """The ids that the model wrote, for calls in a list; one in another form is left out."""
    try:
        made = json.loads(text.partition("[TOOL_CALLS]")[2])
    except (ValueError, RecursionError):
        return
    for call, item in zip(message.get("tool_calls", ()), made, strict=False):
        if isinstance(item, dict) and isinstance(item.get("id"), str) and _ID.fullmatch(item["id"]):
            call["id"] = item["id"]


def _is_cut(family: dict[str, Any], text: str) -> bool:
    """Whether a call holds more than whole pairs of name and value: one that is not closed would be dropped."""
    calls = family["fields"]["tool_calls"]
    closed = re.compile(calls["close_pattern"])
    for opened in re.finditer(calls["open_pattern"], text):
        end = closed.search(text, opened.end())
        body = text[opened.end() : end.start() if end else len(text)]
        rest = re.sub(calls["content_args"]["tag_pattern"], "", body, flags=re.DOTALL)
        if rest.replace("</function>", "").strip():
            return True
    return False
