"""gpt-oss's format: messages in channels for analysis, calls, text before a call, and the final answer.

The recipient of a call, ` to=NAME`, is written after the channel or before it, next to the role. Every message with a
recipient is a call, no matter what its channel is. The turn's opening ends within the role.
"""

import re

from agentgym.chat.formats.calls import joined, json_at, made_call, raw_call, skip_blanks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")
"""The end of a message. A message that isn't ended goes up to the next one."""
_HEAD = re.compile(r"<\|(?:start|channel)\|>|(?:^|\s)to=")
"""The beginning of a message's head."""
_RECIPIENT = re.compile(r"(?:^|[\s>])to=(?:functions\.)?(?P<name>[^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*+(?P<name>\w+)")
_HEAD_PARTS = re.compile(r"<\|(?:start|channel|constrain)\|>\s*+\w*+|<\|(?:end|call|return)\|>")


def _read(text: str, tools: Tools) -> Reading:
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    pieces: list[str] = []
    end = 0
    while (at := text.find(_MESSAGE, end)) >= 0:
        before, head = _split_head(text[end:at])
        pieces.append(before)
        start = at + len(_MESSAGE)
        recipient, channel = _RECIPIENT.search(head), _CHANNEL_NAME.search(head)
        if recipient:
            arguments, end = _arguments(text, start)
            calls.append(made_call(recipient["name"], arguments, tools))
        else:
            body, end = _body(text, start)
            (thoughts if channel and channel["name"] == "analysis" else pieces).append(body)
    rest = text[end:]
    if _CHANNEL in rest and _RECIPIENT.search(rest):
        calls.append(raw_call(rest.strip()))
    pieces.append(_HEAD_PARTS.sub("", rest))
    return Reading(joined(pieces), calls, joined(thoughts))


def _split_head(text: str) -> tuple[str, str]:
    """Return the text before a message's head, and the head."""
    found = _HEAD.search(text)
    return (text, "") if found is None else (text[: found.start()], text[found.start() :])


def _body(text: str, start: int) -> tuple[str, int]:
    """Return the body of the message that begins at `start`, and the place after its end."""
    ended = _END.search(text, start)
    return (text[start:], len(text)) if ended is None else (text[start : ended.start()], ended.end())


def _arguments(text: str, start: int) -> tuple[object, int]:
    """Return a call's arguments and its end. Text that isn't JSON is returned as it is."""
    ok, value, end = json_at(text, start)
    if ok:
        end = skip_blanks(text, end)
        ended = _END.match(text, end)
        if ended is not None or end == len(text):
            return value, ended.end() if ended else end
    body, end = _body(text, start)
    return body.strip(), end


HARMONY = ResponseFormat(
    name="harmony",
    marks=(_CHANNEL, _MESSAGE),
    example=f'{_CHANNEL}commentary to=functions.NAME <|constrain|>json{_MESSAGE}{{"KEY": "VALUE"}}<|call|>',
    call_marks=((f"{_CHANNEL}commentary to=", "<|call|>"),),
    read=_read,
    reasoning=(),
)
