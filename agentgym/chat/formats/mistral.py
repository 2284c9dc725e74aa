"""Mistral's formats: one [TOOL_CALLS] for each call since tokenizer v11, and one list of calls up to v7."""

import re

from agentgym.chat.formats.calls import call_of, joined, json_at, made_call, raw_call, skip_blanks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

_OPEN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*+(?P<name>[^\s\[\]{}]++)\s*+(?:\[CALL_ID\](?P<id>\w++)\s*+)?(?:\[ARGS\]|(?=\{))")
_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The form of a call id that Mistral's templates accept."""
_REASONING = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))


def _read(text: str, tools: Tools) -> Reading:
    calls: list[ToolCall] = []
    pieces: list[str] = []
    end = 0
    while (at := text.find(_OPEN, end)) >= 0:
        pieces.append(text[end:at])
        call, end = _call(text, at + len(_OPEN), tools)
        calls.append(call)
    return Reading(joined([*pieces, text[end:]]), calls)


def _call(text: str, start: int, tools: Tools) -> tuple[ToolCall, int]:
    """Return the call whose name begins at `start`, and its end."""
    head = _HEAD.match(text, start)
    if head is not None:
        ok, arguments, end = json_at(text, head.end())
        if ok and _is_end(text, end):
            return made_call(head["name"], arguments, tools, call_id=_id(head["id"])), end
    end = text.find(_OPEN, start)
    end = len(text) if end < 0 else end
    if head is None:
        return raw_call(text[start:end].strip()), end
    return made_call(head["name"], text[head.end() : end].strip(), tools), end


def _is_end(text: str, end: int) -> bool:
    """Return whether the text ends after a call's arguments, or goes on with the next call or with a line of text."""
    after = skip_blanks(text, end)
    return after == len(text) or text.startswith(_OPEN, after) or "\n" in text[end:after]


def _id(written: object) -> str | None:
    return written if isinstance(written, str) and _ID.fullmatch(written) else None


def _read_list(text: str, tools: Tools) -> Reading:
    content, mark, written = text.partition(_OPEN)
    if not mark:
        return Reading(text.strip(), [])
    _, listed, end = json_at(written, 0)
    if not isinstance(listed, list) or not listed:
        return Reading(text, [raw_call(written.strip())])
    ids = [_id(item.get("id")) if isinstance(item, dict) else None for item in listed]
    calls = [call_of(item, tools, call_id=made) for item, made in zip(listed, ids, strict=True)]
    return Reading(joined([content, written[end:]]), calls)


MISTRAL = ResponseFormat(
    name="mistral",
    marks=(_OPEN, "[ARGS]"),
    example=f'{_OPEN}NAME[ARGS]{{"KEY": "VALUE"}}',
    call_marks=((_OPEN, ""),),
    read=_read,
    reasoning=_REASONING,
)
MISTRAL_LIST = ResponseFormat(
    name="mistral_list",
    marks=(_OPEN,),
    example=f'{_OPEN}[{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}]',
    call_marks=((_OPEN, ""),),
    read=_read_list,
    reasoning=_REASONING,
)
