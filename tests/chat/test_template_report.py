"""The doctor's findings about a chat template, on templates that have one fault each."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from agentgym.chat.template_report import check_template
from agentgym.engines.scripted import ByteTokenizer
from agentgym.types.messages import Message

ALL = ["appends text", "appends calls", "appends thought", "separators", "tool calls"]


class ForgetsThoughts(ByteTokenizer):
    """A template that shows thinking until the next user message."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = [
            m | {"content": f"<think>{m['reasoning_content']}</think>{m['content']}"}
            if m.get("reasoning_content") and i > last - 2
            else m
            for i, m in enumerate(messages)
        ]
        return super().render(shown, tools, generation=generation)


class Numbers(ByteTokenizer):
    """A template that starts with the number of messages."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        return f"{len(messages)} messages\n" + super().render(messages, tools, generation=generation)


JOINED = 300


class NoSeparator(ByteTokenizer):
    """A tokenizer that joins the newline after a turn with the special token before it."""

    def encode(self, text: str) -> list[int]:
        joined: list[int] = []
        for i in super().encode(text):
            if i == 10 and joined and joined[-1] == self.END:
                joined[-1] = JOINED
            else:
                joined.append(i)
        return joined

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode([self.END if i == JOINED else i for i in token_ids])


class OtherCalls(ByteTokenizer):
    """A template that writes calls in an unknown format."""

    def _body(self, message: Message) -> str:
        return str(message["content"]) + "".join(
            f"CALL {json.dumps(c['function'])}" for c in message.get("tool_calls", ())
        )


class Refuses(ByteTokenizer):
    """A template without tool support."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        if tools:
            raise RuntimeError("no tools here")
        return super().render(messages, tools, generation=generation)


class NextEnds(ByteTokenizer):
    """A template that ends a turn with the next speaker's token and starts it with an empty thought."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        head = "".join(json.dumps(tool) + "\n" for tool in tools)
        said = [f"<|im_start|>\n<t></t>\n{self._body(m)}" for m in messages]
        told = [f"<|im_end|>\n{m['content']}" for m in messages]
        both = zip(messages, said, told, strict=True)
        text = "".join(a if m["role"] == "assistant" else b for m, a, b in both)
        return head + text + ("<|im_start|>" if generation else "")

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        return super().parse(text.replace("<t></t>\n", ""), tools)


class LeavesItsOpening(ByteTokenizer):
    """A parser that keeps a piece of the opening before every answer."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        read = super().parse(text, tools)
        return read if "tool_calls" in read else read | {"content": f"</think>{text}"}


@pytest.mark.parametrize(
    ("tokenizer", "faults"),
    [
        (ByteTokenizer(), {}),
        (ForgetsThoughts(), {"appends thought": "the template rewrites"}),
        (
            Numbers(),
            dict.fromkeys(ALL[:3], "the template rewrites")
            | {"separators": "does not start", "tool calls": "does not start"},
        ),
        (NoSeparator(), {"separators": "encoded differently"}),
        (NextEnds(), {}),
        (LeavesItsOpening(), {"tool calls": "is parsed back as '</think>It is four.'"}),
        (OtherCalls(), {"tool calls": "parsed as text"}),
        (Refuses(), {"appends calls": "refuses the chat: RuntimeError: no tools", "tool calls": "refuses"}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_template_fault_is_found_and_reported(tokenizer: ByteTokenizer, faults: dict[str, str]) -> None:
    traits = list(check_template(tokenizer))
    assert [trait.name for trait in traits] == ALL
    assert {trait.name for trait in traits if not trait.ok} == faults.keys()
    assert not any("refuses" in trait.detail for trait in traits if not isinstance(tokenizer, Refuses))
    assert all(part in next(t.detail for t in traits if t.name == name) for name, part in faults.items())
