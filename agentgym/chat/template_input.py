"""Conversion of conversations for a chat template: roles, calls and tools that it doesn't show become text."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, TypeAlias

from agentgym.chat.fitting import joined
from agentgym.chat.template_probes import TemplateFacts
from agentgym.chat.tools_in_prompt import calls_as_text, results_as_text, with_tools
from agentgym.types.messages import Message, ToolCall, joined as joined_contents

ToolsIn: TypeAlias = Literal["auto", "template", "prompt", "refuse"]
"""What describes the tools to the model: the chat template, or text in the system prompt.

`auto` uses the template if it shows tools and the format of its calls is known, otherwise the prompt. `refuse` uses the
template, and refuses tools if that wouldn't work.
"""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """Converts messages and tools to a form in which the template shows all of them."""

    facts: TemplateFacts
    lists_tools: bool
    """Whether the tools are listed in the system message, and not passed to the template."""
    calls_as_text: bool
    """Whether calls and results are written as text in the Hermes format."""
    example: str | None = None
    """How the template writes a call, for the list of tools; None describes the Hermes format."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the template shows every conversation as it is."""
        facts = self.facts
        shown = facts.arguments == "object" and not facts.dropped and facts.results and facts.system
        return shown and facts.late_system and not self.lists_tools and not self.calls_as_text

    def tools(self, tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the tools to pass to the template."""
        return [] if self.lists_tools else tools

    def messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Return the messages to pass to the template."""
        splits = not self.calls_as_text and (False, True) in self.facts.dropped
        made = _one_call_each(messages) if splits else list(messages)
        made = [self._call(message) if "tool_calls" in message else message for message in made]
        if self.calls_as_text or not self.facts.results:
            made = results_as_text(made)
        if self.lists_tools:
            made = with_tools(made, tools, self.example)
        return self._folded(made)

    def _call(self, message: Message) -> Message:
        if self.calls_as_text or self.facts.drops(message):
            return calls_as_text(message)
        return _with_text_arguments(message) if self.facts.arguments == "text" else message

    def _folded(self, messages: list[Message]) -> list[Message]:
        """Return the messages, with each system message that the template doesn't show as a part of a user message."""
        facts, made = self.facts, messages
        if not facts.system and made and made[0]["role"] == "system":
            system, rest = made[0], made[1:]
            if rest and rest[0]["role"] == "user":
                content = joined_contents([system["content"], rest[0]["content"]], "\n\n")
                made = [rest[0] | Message(role="user", content=content), *rest[1:]]
            else:
                made = [_from_user(system), *rest]
        if not facts.late_system:
            made = [_from_user(m) if i and m["role"] == "system" else m for i, m in enumerate(made)]
        return joined(made) if facts.alternates else made


EXAMPLE = Message(
    role="assistant",
    content="",
    tool_calls=[
        ToolCall(id="call00100", type="function", function={"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}})
    ],
)
"""A turn with a call, which the template writes for the list of tools."""


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with each turn of several calls as one turn for each call, followed by the call's result."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        results = list(takewhile(lambda after: after["role"] == "tool", messages[at:]))
        at += len(results)
        made += _paired(message, results)
    return made


def _paired(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield one turn for each call of a message, followed by the call's results. Text is part of the first turn."""
    calls = message["tool_calls"]
    ids = [call.get("id") for call in calls]
    owners = [
        ids.index(given) if (given := result.get("tool_call_id")) in ids else min(place, len(calls) - 1)
        for place, result in enumerate(results)
    ]
    for place, call in enumerate(calls):
        first = message if place == 0 else Message(role=message["role"], content="")
        yield first | Message(role=message["role"], content=first["content"], tool_calls=[call])
        yield from (result for owner, result in zip(owners, results, strict=True) if owner == place)


def _from_user(message: Message) -> Message:
    return Message(role="user", content=message["content"])


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text."""
    calls = [call.copy() for call in message["tool_calls"]]
    for call in calls:
        made = call["function"]["arguments"]
        written = made if isinstance(made, str) else json.dumps(made, ensure_ascii=False)
        call["function"] = {"name": call["function"]["name"], "arguments": written}
    return message | Message(role=message["role"], content=message["content"], tool_calls=calls)
