# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""The interface of a response format, and what all formats share.

A format is a file of this package that creates one `ResponseFormat`. Its own part is `read`, which finds the calls in
a text. Reasoning, malformed calls and texts that only look like a call are the same in every format.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from agentgym.chat.formats.calls import json_at, raw_call
from agentgym.chat.reasoning import THINK, split_reasoning
from agentgym.types.messages import Message, ToolCall

Tools: TypeAlias = Sequence[dict[str, Any]]
"""The schemas of the tools that the model was offered."""
CALL_MARKS = (
    "<tool_call",
    "<function=",
    "<function_call",
    "<|tool_call",
    "<|python_tag|>",
    "<|python_start|>",
    "functools[",
    "[TOOL_CALLS]",
    "<｜tool▁call",
    "<｜DSML｜",
    "<invoke name=",
    "<minimax:tool_call",
    "]<]minimax[>[<tool_call",
    "<|channel|>commentary to=",
    "to=functions.",
)
"""The beginnings of a call in any family. A line that begins with one of them was meant as a call."""


class Reading(NamedTuple):
    """The parts that a format found in a text."""

    content: str
    """The text outside the calls."""
    calls: list[ToolCall]
    """The calls in order. The arguments of a malformed call are the text that the model wrote."""
    thought: str = ""
    """The reasoning, in a format that reads it itself (`reasoning` is empty)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseFormat:
    """How the models of a family write tool calls and reasoning.

    Each format must satisfy these laws, which are tested for each entry of `RESPONSE_FORMATS`:

    - `read` takes any text and any tools' schemas, and its time is linear in the length of the text. Search with
      `str.find` or with patterns that can't backtrack over the same text twice; never with a lazy `.*?`.
    - The example is read as a call of NAME with the arguments {"KEY": "VALUE"}.
    - A value is read whole, or the call is malformed. It is never cut short.
    """

    name: str
    """The name in `RESPONSE_FORMATS`."""
    marks: tuple[str, ...]
    """The delimiters by which a chat template of this format is recognized. It contains all of them."""
    example: str
    """A call of NAME with one argument, KEY, whose value is VALUE. The model reads it after a malformed call."""
    call_marks: tuple[tuple[str, str], ...]
    """The marks around a call: pairs of an opening and a closing mark, as for `split_reasoning`.

    A text that has an opening mark but no call is a malformed call.
    """
    read: Callable[[str, Tools], Reading]
    """Function that finds the calls in a text without reasoning. `calls.made_call` makes a call, and `raw_call` a
    malformed one.
    """
    call_starts: tuple[str, ...] = ()
    """Further texts with which a call may begin, but that other texts may contain as well. Marks of reasoning after one
    of them are part of the call.
    """
    reasoning: tuple[tuple[str, str], ...] = (THINK,)
    """The marks around reasoning. Empty if `read` finds the reasoning itself."""

    @cached_property
    def _beginnings(self) -> tuple[tuple[str, str], ...]:
        return (*self.call_marks, *((start, "") for start in self.call_starts))

    def parse(self, text: str, tools: Tools, *, inside: bool | None = None) -> Message:
        """Parse a sampled text into an assistant message, without ever raising.

        If a call is malformed, the whole text is the content.

        Args:
            text: The text of a turn, without its stop token.
            tools: The schemas of the tools.
            inside: Whether the text begins inside its reasoning (see `split_reasoning`).
        """
        thought, rest = "", text
        if self.reasoning:
            thought, rest = split_reasoning(text, inside=inside, marks=self.reasoning, calls=self._beginnings)
        try:
            content, calls, own_thought = self.read(rest, tools)
        except Exception:  # The model chose the text, and an agent may have chosen its tools' schemas.
            content, calls, own_thought = rest, [raw_call(rest)], ""
        malformed = _any_malformed(calls)
        if not malformed and self.looks_like_call(content, () if calls else tools):
            malformed, calls = True, [*calls, raw_call(content if calls else rest)]
        if malformed:
            return {"role": "assistant", "content": text, "tool_calls": calls}
        message: Message = {"role": "assistant", "content": content}
        if thought := thought or own_thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls[:]  # A slice has no spare capacity.
        return message

    def looks_like_call(self, content: str, tools: Tools) -> bool:
        """Return whether a text without calls was meant as one.

        It was if it has an opening mark of this format. If there are tools, it also was if a line begins with another
        family's mark, or if the text begins with a JSON object that names a tool.

        Args:
            content: The text outside the calls.
            tools: The schemas of the tools.
        """
        for opening, _ in self.call_marks:
            if opening in content:
                return True
        return looks_like_call(content, tools)


def looks_like_call(text: str, tools: Tools) -> bool:
    """Return whether a text without calls was meant as a call in any format.

    It was if there are tools, and a line begins with a family's mark or the text with a JSON object that names a tool.

    Args:
        text: The text, without reasoning.
        tools: The schemas of the tools.
    """
    return bool(tools) and (_has_line_of_call(text) or _names_tool(text, tools))


def _any_malformed(calls: Sequence[ToolCall]) -> bool:
    for call in calls:  # noqa: SIM110  It runs once a turn, and any() costs twice as much.
        if isinstance(call["function"]["arguments"], str):
            return True
    return False


_LINE_OF_CALL = re.compile(rf"^[ \t]*+(?:{'|'.join(map(re.escape, CALL_MARKS))})", re.MULTILINE)


def _has_line_of_call(text: str) -> bool:
    """Return whether a line begins with a mark of calls. Most texts have no character that a mark begins with."""
    may = "<" in text or "[" in text or "to=" in text
    return may and _LINE_OF_CALL.search(text) is not None


def _names_tool(text: str, tools: Tools) -> bool:
    """Return whether a text begins with a JSON object, also in a list or a code block, that names a tool.

    The object may be cut off or not quite JSON.
    """
    if text[:1] not in _STARTS and text.lstrip()[:1] not in _STARTS:
        return False
    start = text.lstrip().removeprefix("```json").removeprefix("```").lstrip().removeprefix("[").lstrip()
    if not start.startswith("{"):
        return False
    names = frozenset(tool["function"]["name"] for tool in tools)
    ok, value, _ = json_at(start, 0)
    if not ok:
        named = any(found["name"] in names for found in _BROKEN_NAME.finditer(start))
        return named and _BROKEN_ARGUMENTS.search(start) is not None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    given = (value.get("name"), value.get("function"))
    return any(name in names for name in given if isinstance(name, str)) and not value.keys().isdisjoint(_ARGUMENTS)


_STARTS = ("{", "[", "`")
_ARGUMENTS = ("arguments", "parameters", "args")
_BROKEN_NAME = re.compile(r"""(['"])(?:name|function)\1\s*+:\s*+(['"])(?P<name>[^'"]++)\2""")
_BROKEN_ARGUMENTS = re.compile(rf"""(['"])(?:{"|".join(_ARGUMENTS)})\1\s*+:""")
"""The name and the arguments of a call in an object that isn't valid JSON."""
