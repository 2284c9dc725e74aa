"""What is asked once of a chat template: what it looks for, what it refuses, and what it writes behind a turn."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from agentgym.chat.fitting import wants_calls
from agentgym.chat.template_deltas import after_nth
from agentgym.messages import Message

_ASK = Message(role="user", content="?")
_SHOWN = "Qzx0xzQ"


class Renders(Protocol):
    """The part of a ChatTokenizer that is asked here."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        """The chat as text."""
        ...


class Template:
    """Answers that hold for one tokenizer's template; each is found by rendering a made-up chat, once."""

    def __init__(self, tokenizer: Renders) -> None:
        self.sought: re.Pattern[str] | None = any_of(getattr(tokenizer, "sought", ()))
        """Words that change what the template writes; a tokenizer names them in `sought`."""
        self.alone: bool = getattr(tokenizer, "cuts_at_marks", False)
        """Whether what stands behind a mark has the ids it has alone; a tokenizer says so in `cuts_at_marks`."""
        self.asked = "\0"
        """One question as the template shows it, once that was rendered."""
        self._wants_calls: bool | None = None
        self._ends: dict[tuple[str, str, bool], bool] = {}

    def wants_calls(self, tokenizer: Renders) -> bool:
        """Whether a tool's message needs a call before it, even where the model's call was malformed."""
        if self._wants_calls is None:
            self._wants_calls = wants_calls(lambda messages: tokenizer.render(messages, [], generation=True))
        return self._wants_calls

    def ends(self, tokenizer: Renders, end: str, reply: Message, new: Sequence[Message]) -> bool:
        """Whether the template writes `end` directly behind a reply like this, before what answers it.

        Some models end a turn with the mark of who speaks next, and may name the wrong one.
        """
        if not new:
            return True
        key = (end, new[0]["role"], "tool_calls" in reply)
        if key not in self._ends:
            if len(self._ends) >= 64:
                self._ends.clear()
            self._ends[key] = self._ask_end(tokenizer, end, reply, new[0])
        return self._ends[key]

    def _ask_end(self, tokenizer: Renders, end: str, reply: Message, first: Message) -> bool:
        answer = first.copy()
        answer["content"] = _SHOWN
        try:
            before = tokenizer.render([_ASK], [], generation=True)
            whole = tokenizer.render([_ASK, reply, answer], [], generation=True)
        except Exception:  # It does not take these messages: nothing is known.
            return True
        if not whole.startswith(before) or _SHOWN not in whole:
            return True
        at = after_nth(whole, end, len(before), 0)
        return at is not None and _SHOWN not in whole[len(before) : at]


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables; those that a chat sets itself are refused."""
    own = sorted(given.keys() & _OWN)
    if own:
        raise ValueError(f"chat_template_kwargs: {', '.join(own)} cannot be set here; the chat sets them itself")
    return dict(given)


_OWN = frozenset(
    ["conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict"]
)


_QUOTED = r"(['\"])((?:(?!\1).)+)\1"


_IN = re.compile(_QUOTED + r"\s+(?:not\s+)?in\b")


_ASKED = re.compile(r"\.(?:startswith|endswith|split|rsplit|replace|find|index|count|partition)\(\s*" + _QUOTED)


_KEYS = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name", "function"}
    | {"arguments", "parameters", "id", "type", "text", "image", "image_url", "video", "audio", "properties", "items"}
    | {"required", "description", "return", "enum"}
)
"""Names of fields: a template that asks whether a message has one does not look into its text."""


def sought_words(template: str) -> set[str]:
    """What the template's source compares parts of a text with; the names of a message's fields are left out."""
    found = {match[2] for pattern in (_IN, _ASKED) for match in pattern.finditer(template)}
    words = {word.replace("\\n", "\n") for word in found - _KEYS}
    return {word for word in words if word.strip()}


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds each of the words; None where there are none."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
