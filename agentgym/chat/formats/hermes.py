"""The Hermes format: {"name": .., "arguments": ..} between <tool_call> tags. Qwen 2.5 and 3 write it."""

from agentgym.chat.formats.calls import call_of, joined, json_at, skip_blanks
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.chat.reasoning import TAGGED_CALL
from agentgym.types.messages import ToolCall

OPEN, CLOSE = TAGGED_CALL


def _read(text: str, tools: Tools) -> Reading:
    at = text.find(OPEN)
    if at < 0:
        return Reading(text.strip(), [])
    calls: list[ToolCall] = []
    pieces: list[str] = []
    end = 0
    while at >= 0:
        pieces.append(text[end:at])
        value, end = _value(text, at + len(OPEN))
        calls.append(call_of(value, tools))
        at = text.find(OPEN, end)
    pieces.append(text[end:])
    return Reading(joined(pieces), calls)


def _value(text: str, start: int) -> tuple[object, int]:
    """Return the JSON value between a call's tags, and the call's end. Text that isn't JSON is returned as it is."""
    ok, value, end = json_at(text, start)
    if ok:
        end = skip_blanks(text, end)
        if text.startswith(CLOSE, end):
            return value, end + len(CLOSE)
        if end == len(text) or text.startswith(OPEN, end):
            return value, end
    close = text.find(CLOSE, start)
    if close < 0:
        return text[start:].strip(), len(text)
    return text[start:close].strip(), close + len(CLOSE)


HERMES = ResponseFormat(
    name="hermes",
    marks=(OPEN,),
    example=f'{OPEN}\n{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}\n{CLOSE}',
    call_marks=(TAGGED_CALL,),
    read=_read,
)
