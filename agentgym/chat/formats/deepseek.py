# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""DeepSeek's formats: V3 and R1 write a fenced JSON block after the name, and V3.1 bare JSON. Both are read alike."""

import re

from agentgym.chat.formats.calls import joined, json_at, made_call
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.types.messages import ToolCall

_OPEN, _CLOSE, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_ALL, _ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN = re.compile(rf"(?:{_ALL}\s*+)?{_OPEN}(?:function{_SEP})?(?P<name>[^\s<]++)(?:{_SEP}|\s*+```(?:json)?\s)")
_END = re.compile(rf"\s*+(?:```\s*+)?{_CLOSE}\s*+(?:{_ALL_CLOSE})?")


def _read(text: str, tools: Tools) -> Reading:
    calls: list[ToolCall] = []
    pieces: list[str] = []
    end = 0
    while (begin := _BEGIN.search(text, end)) is not None:
        pieces.append(text[end : begin.start()])
        arguments, end = _arguments(text, begin.end())
        calls.append(made_call(begin["name"], arguments, tools))
    return Reading(joined([*pieces, text[end:]]), calls)


def _arguments(text: str, start: int) -> tuple[object, int]:
    """Return a call's arguments and its end. Text that isn't JSON is returned as it is."""
    ok, value, end = json_at(text, start)
    if ok:
        ended = _END.match(text, end)
        if ended is not None or not text[end:].strip(" \t\n\r`"):
            return value, ended.end() if ended else len(text)
    ended = _END.search(text, start)
    if ended is None:
        return text[start:].strip(), len(text)
    return text[start : ended.start()].strip(), ended.end()


def _response_format(name: str, example: str, *marks: str) -> ResponseFormat:
    return ResponseFormat(
        name=name,
        marks=(_OPEN, *marks),
        example=f"{_ALL}{_OPEN}{example}{_CLOSE}{_ALL_CLOSE}",
        call_marks=((_OPEN, _CLOSE), (_ALL, _ALL_CLOSE)),
        read=_read,
    )


DEEPSEEK_V3 = _response_format("deepseek_v3", f'function{_SEP}NAME\n```json\n{{"KEY": "VALUE"}}\n```', "```json")
DEEPSEEK = _response_format("deepseek", f'NAME{_SEP}{{"KEY": "VALUE"}}')
