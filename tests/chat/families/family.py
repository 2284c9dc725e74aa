# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""A model family in the table of `docs/families.md`: its template, and what its chats do, as they are observed."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentgym.chat.chat import Chat
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.types.messages import Message, ToolCall
from tests.support.family_tokenizers import family_tokenizer

_SPECIAL = re.compile(
    r"<\|[^\s|<>]+\|?>|<[^\s|<>]+\|>|<｜[^\s<>]+｜>|\[/?[A-Z_]{3,}\]|</?think>|\]~!b\[|\]~b\]|\[e~\[|\]<\]minimax\[>\["
)
"""The form of the families' special tokens, for the tokenizers of these tests."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "integer"}, "what": {"type": "string"}},
                "required": [],
            },
        },
    }
    for name in ("look", "find")
]
ASK = Message(role="user", content="What is there?")
AGAIN = Message(role="user", content="Are you sure?")
THOUGHT = "Let me count."
SAID = Message(role="assistant", content="It is four.", reasoning_content=THOUGHT)


def seen(call: ToolCall) -> Message:
    """Return the answer to a call."""
    return Message(role="tool", name=call["function"]["name"], tool_call_id=call["id"], content="57")


class Refused(Exception):
    """Raised if a template doesn't write a turn behind its opening."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: where its template comes from, and the tokens that end a turn."""

    name: str
    template: str
    """The chat template's text."""
    end: str
    """The special token that ends a turn."""
    call_end: str = ""
    """The special token that ends a turn with calls, if it is another one."""
    call_id: str = "call{count:05}"
    """The form of the ids of calls, which some templates write."""

    @cached_property
    def calls(self) -> list[ToolCall]:
        """Two calls."""
        made: list[tuple[str, dict[str, Any]]] = [("look", {"at": 3, "what": "a b"}), ("find", {"what": "c"})]
        ids = [self.call_id.format(name=name, number=number, count=number + 1) for number, (name, _) in enumerate(made)]
        return [
            ToolCall(id=ids[n], type="function", function={"name": name, "arguments": arguments})
            for n, (name, arguments) in enumerate(made)
        ]

    def turn(self, calls: int) -> Message:
        """Return an assistant's turn with a thought and this number of calls."""
        return Message(role="assistant", content="", reasoning_content=THOUGHT, tool_calls=self.calls[:calls])

    @cached_property
    def tokenizer(self) -> HuggingFaceTokenizer:
        """The tokenizer of this family's template."""
        found = {*_SPECIAL.findall(self.template), self.call_end} - {""}
        return family_tokenizer(self.template, self.end, sorted(found))

    def written(self, turn: Message) -> str:
        """Return the text of an assistant's turn as the template writes it, without the token that ends it.

        Raises:
            Refused: If the template doesn't write the turn behind its opening.
        """
        opened = self.tokenizer.render([ASK], TOOLS, generation=True)
        try:
            whole = self.tokenizer.render([ASK, turn], TOOLS, generation=False)
        except Exception as error:  # Templates can raise anything.
            raise Refused(str(error)) from error
        short = opened.removesuffix("<think>\n")
        if whole.startswith(opened):
            written = whole.removeprefix(opened)
        elif whole.startswith(short):  # The template drops the thought at once.
            written = f"{THOUGHT}\n</think>\n\n{whole.removeprefix(short)}"
        else:
            raise Refused(whole)
        return written.partition(self._end(turn))[0]

    def _end(self, turn: Message) -> str:
        return self.call_end if "tool_calls" in turn and self.call_end else self.end

    def shows_tools(self) -> str | None:
        """Return what shows the tools: the template or the prompt; None if nothing names them."""
        named = "find" in self.tokenizer.render([ASK], TOOLS, generation=True)
        return self.tokenizer.tools_shown_by if named else None

    def reads(self, calls: int) -> bool:
        """Return whether a turn with this number of calls is read as the template writes it."""
        try:
            read = self.tokenizer.parse(self.written(self.turn(calls)), TOOLS)
        except Refused:
            return False
        return [call["function"] for call in read.get("tool_calls", ())] == [
            call["function"] for call in self.calls[:calls]
        ]

    def thoughts(self) -> str:
        """Return how long a turn's thought is shown: in which of the prompts that follow it."""
        if THOUGHT in self.tokenizer.render([ASK, SAID, AGAIN], TOOLS, generation=True):
            return "kept"
        shown = self.tokenizer.render([ASK, self.turn(1), seen(self.calls[0])], TOOLS, generation=True)
        return "to next question" if THOUGHT in shown else "dropped"

    def extends(self) -> tuple[bool, bool]:
        """Return whether the result of a call, and then a question after an answer, are appended to the turn before."""
        chat = Chat(self.tokenizer, TOOLS, [ASK])
        turns = [(self.turn(1), seen(self.calls[0])), (SAID, AGAIN)]
        appended = []
        for turn, answer in turns:
            chat.prompt_ids()
            sampled = self.tokenizer.encode(self.written(turn) + self._end(turn))
            appended.append(chat.extend(sampled, turn, [answer]) is not None)
        return appended[0], appended[1]
