"""What a chat template shows of a conversation, found by rendering probes with words that no template contains."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agentgym.types.messages import Message, ToolCall

RenderWithTools: TypeAlias = Callable[[Sequence[Message], Sequence[dict[str, Any]]], str]
"""A function that renders messages and tools, up to and including the opening of an assistant turn."""
ArgumentForm: TypeAlias = Literal["object", "text"]
"""The form of a call's arguments that a template takes: an object, or its JSON text."""
UNUSUAL = "Qzxsaid"
"""A text that no chat template contains."""
ASK = Message(role="user", content="Qzxask")
MORE = Message(role="user", content="Qzxmore")
SAID = Message(role="assistant", content=UNUSUAL)
_SYSTEM = Message(role="system", content="Qzxsystem")
_LATE = Message(role="system", content="Qzxlate")
_TOOL = {
    "type": "function",
    "function": {
        "name": "qzxlook",
        "description": "Qzxlooks.",
        "parameters": {
            "type": "object",
            "properties": {"qzxat": {"type": "string", "description": "Qzxplace."}, "qzxfar": {"type": "boolean"}},
            "required": ["qzxat"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template shows of a conversation."""

    user: bool
    """Whether the text of a user's message is shown."""
    tools: bool
    """Whether the names and parameters of tools are shown."""
    arguments: ArgumentForm | None
    """The form of arguments in which a call is shown, with each value encoded once; None if no form shows calls."""
    dropped: frozenset[tuple[bool, bool]]
    """The kinds of turns of which a call is dropped: whether there is text beside the calls, and whether there are
    several calls.
    """
    results: bool
    """Whether messages with the role "tool" are shown."""
    system: bool
    """Whether a system message at the start is shown."""
    late_system: bool
    """Whether a system message later in the conversation is shown."""
    alternates: bool
    """Whether two user messages in a row are rejected."""

    def drops(self, message: Message) -> bool:
        """Return whether the template would drop a call of this message, which has calls."""
        return self.arguments is None or (bool(message["content"]), len(message["tool_calls"]) > 1) in self.dropped


def shows_tools(render: RenderWithTools) -> bool:
    """Return whether a template shows the tools' names and parameters, with a system message and without one."""
    told = [_rendered(render, messages, [_TOOL]) for messages in ([ASK], [_SYSTEM, ASK])]
    shown = ["qzxlook" in text and "qzxat" in text for text in told if text is not None]
    return bool(shown) and all(shown)


def template_facts(render: RenderWithTools, *, tools: bool) -> TemplateFacts:
    """Find out what a template shows.

    Args:
        render: Renders a conversation with the template.
        tools: Whether the template gets the tools, which may be a condition for showing calls.
    """
    offered = [_TOOL] if tools else []

    def shows(*messages: Message) -> bool:
        """Return whether the messages' contents are shown in their order, in any case of letters."""
        text = _rendered(render, messages, offered)
        pattern = ".*".join(re.escape(message["content"]) for message in messages)
        return text is not None and re.search(pattern, text, re.DOTALL | re.IGNORECASE) is not None

    arguments = next((form for form in _FORMS if _shows_calls(render, offered, form, "", 1)), None)
    dropped = [
        (bool(text), count > 1)
        for text in ("", "Qzxtext")
        for count in (1, 2)
        if arguments and _shows_calls(render, offered, arguments, text, count) is False
    ]
    system = shows(_SYSTEM, ASK)
    starts = [[], [_SYSTEM]] if system else [[]]
    return TemplateFacts(
        user=shows(ASK),
        tools=shows_tools(render),
        arguments=arguments,
        dropped=frozenset(dropped),
        results=shows(ASK, turn_with_calls(arguments or "object", "", 1), result(0)),
        system=system,
        late_system=all(shows(*start, ASK, SAID, _LATE, *end) for start in starts for end in ([], [MORE])),
        alternates=not shows(ASK, MORE),
    )


_FORMS: tuple[ArgumentForm, ArgumentForm] = ("object", "text")


def _arguments(index: int) -> dict[str, Any]:
    return {"qzxat": f'Qzxvalue"{index}', "qzxfar": True}


def turn_with_calls(form: ArgumentForm, text: str, count: int) -> Message:
    """Return a turn with this text and number of calls.

    The arguments contain a quotation mark, so that arguments that are encoded twice can be recognized.
    """
    calls = [
        ToolCall(
            id=_id(i),
            type="function",
            function={
                "name": f"qzxlook{i}",
                "arguments": _arguments(i) if form == "object" else json.dumps(_arguments(i)),
            },
        )
        for i in range(count)
    ]
    return Message(role="assistant", content=text, tool_calls=calls)


def _id(index: int) -> str:
    return f"call0010{index}"  # nine letters and digits, as Mistral's templates require


def result(index: int) -> Message:
    """Return the result of the call with this index."""
    return Message(role="tool", content=f"Qzxresult{index}", name=f"qzxlook{index}", tool_call_id=_id(index))


def _shows_calls(
    render: RenderWithTools, tools: Sequence[dict[str, Any]], form: ArgumentForm, text: str, count: int
) -> bool | None:
    """Return whether calls are shown, with each value encoded once; None if the template rejects such a turn."""
    called, results = turn_with_calls(form, text, count), [result(i) for i in range(count)]
    told = _rendered(render, [ASK, called, *results], tools)
    if told is None:  # Perhaps it only has no role for results.
        told = _rendered(render, [ASK, called], tools)
    if told is None:
        return None
    return all(_is_shown(told, i) for i in range(count))


def _is_shown(told: str, index: int) -> bool:
    arguments = _arguments(index)
    value = arguments["qzxat"]
    once = value in told or json.dumps(value)[1:-1] in told
    return (
        f"qzxlook{index}" in told and once and str(arguments) not in told
    )  # An object can be written as Python's repr.


def _rendered(render: RenderWithTools, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str | None:
    try:
        return render(messages, tools)
    except Exception:  # Templates can raise anything.
        return None
