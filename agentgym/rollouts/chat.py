"""Messages to token ids and back, append-only.

Sampled ids stay verbatim. After a turn only what the template writes *behind* that turn is encoded and
appended: the turn separator, the new messages, the next generation prompt::

    rendered   <user> 2+2? <end>\\n<assistant> | 4 <end> | \\n<user> sure? <end>\\n<assistant>
    ids        opened                          | sampled | appended

A template that rewrites what it rendered before cannot be extended; `Chat.extend` says so with None, and
the caller opens a new segment.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from agentgym.types import Message, ToolCall


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template and a parser for what the model writes."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        """The chat as text; `generation` opens the assistant's turn at its end."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text, special tokens recognised, none added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens kept."""
        ...

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        """The assistant message in a sampled text; never raises.

        A call that is no valid JSON keeps what the model wrote as its `arguments` text.
        """
        ...


class Chat:
    """One segment's conversation beside its ids: it only ever grows at the end."""

    def __init__(self, tokenizer: ChatTokenizer, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.messages = list(messages)
        self.text = tokenizer.render(self.messages, tools, generation=True)

    def prompt_ids(self) -> list[int]:
        """Ids of everything rendered so far, up to the open assistant's turn."""
        return self.tokenizer.encode(self.text)

    def parse(self, token_ids: Sequence[int], *, stopped: bool) -> Message:
        """The assistant message in a turn's ids; `stopped`: the last id is the stop token."""
        text = self.tokenizer.decode(token_ids[:-1] if stopped else token_ids)
        message = self.tokenizer.parse(text, self.tools)
        for i, call in enumerate(message.get("tool_calls", ())):
            call.setdefault("id", f"call_{len(self.messages)}_{i}")
        return message

    def extend(self, token_ids: Sequence[int], reply: Message, new: Sequence[Message]) -> list[int] | None:
        """Ids the template puts behind a finished turn for `new` messages and the next turn's opening.

        `token_ids` is the turn as sampled, its stop token last. None where the template rewrote what is
        already there; the conversation has moved on all the same, and `prompt_ids` renders it whole.
        """
        before, said = self.text, list(self.messages)
        self.messages += [_renderable(reply), *new]
        self.text = self.tokenizer.render(self.messages, self.tools, generation=True)
        if not self.text.startswith(before):
            return None
        end = self.tokenizer.decode(token_ids[-1:])
        body = self.tokenizer.decode(token_ids[:-1])
        skip = body.count(end) if end else 0
        if skip:  # the model wrote the mark as text: count those that the template kept
            silent = Message(role="assistant", content="")
            bare = self.tokenizer.render([*said, silent, *new], self.tools, generation=True)
            skip = self.text.count(end, len(before)) - bare.count(end, len(before))
        at = _after_nth(self.text, end, len(before), skip)
        return None if at is None else self.tokenizer.encode(self.text[at:])


def _renderable(reply: Message) -> Message:
    """The reply as a template can write it: malformed calls are in its content as the model wrote them."""
    if any(isinstance(call["function"]["arguments"], str) for call in reply.get("tool_calls", ())):
        return Message(role="assistant", content=reply["content"])
    return reply


def _after_nth(text: str, mark: str, start: int, skip: int) -> int | None:
    """Where the mark after `skip` others ends; None where there are not that many."""
    if not mark:
        return None
    for _ in range(skip + 1):
        found = text.find(mark, start)
        if found < 0:
            return None
        start = found + len(mark)
    return start


HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            # A malformed call must reach the model as a tool message: keep its text instead of raising.
            "content_args": {"allow_non_json": True},
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""Response template of the Hermes/Qwen family: JSON calls between <tool_call> tags."""
_HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


class HuggingFaceTokenizer:
    """A ChatTokenizer over a fast transformers tokenizer, its chat template and its response template."""

    def __init__(self, tokenizer: Any, response_template: dict[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer: has no chat_template")
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.tokenizer = tokenizer
        # The layer below: the wrappers around it cost more than they do, once a turn.
        self.backend = tokenizer.backend_tokenizer
        template = response_template or getattr(tokenizer, "response_template", None)
        if template is None and "<tool_call>" in tokenizer.chat_template:
            template = HERMES
        self.response_template = None if template is None else load_response_template(template)
        self.opening = self._opening()

    def _opening(self) -> str:
        """What the template writes to open an assistant's turn."""
        ask = [Message(role="user", content="")]
        closed = self.render(ask, [], generation=False)
        return self.render(ask, [], generation=True).removeprefix(closed)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [*messages], tools=[*tools] or None, tokenize=False, add_generation_prompt=generation
        )
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.backend.decode([*token_ids], skip_special_tokens=False)
        return text

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        if self.response_template is None:
            return Message(role="assistant", content=text)
        try:
            parsed = self.tokenizer.parse_response(
                text, self.response_template, prefix=self.opening, tools=[*tools] or None
            )
        except (ValueError, RecursionError):
            return Message(role="assistant", content=text, tool_calls=[raw_call(text)])
        return _message(text, parsed)


def parse_hermes(text: str) -> Message:
    """The assistant message in a text with JSON calls between <tool_call> tags; never raises."""
    calls = [{"function": _loaded(body)} for body in _HERMES_CALL.findall(text)]
    content = text.partition("<tool_call>")[0].strip() if calls else text
    return _message(text, {"content": content, "tool_calls": calls})


def _loaded(body: str) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def raw_call(text: str) -> ToolCall:
    """The call the model tried to write, for the tool message that tells it what was wrong."""
    return ToolCall(type="function", function={"name": "", "arguments": text})


def _message(text: str, parsed: dict[str, Any]) -> Message:
    calls = [_tool_call(call.get("function")) for call in parsed.get("tool_calls") or ()]
    if any(isinstance(call["function"]["arguments"], str) for call in calls):
        return Message(role="assistant", content=text, tool_calls=calls)
    message = Message(role="assistant", content=parsed.get("content") or "")
    if parsed.get("reasoning_content"):
        message["reasoning_content"] = parsed["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(function: object) -> ToolCall:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return raw_call(function if isinstance(function, str) else json.dumps(function))
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(type="function", function={"name": function["name"], "arguments": arguments})
