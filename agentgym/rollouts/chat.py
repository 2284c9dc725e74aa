"""Messages to token ids and back, append-only.

Sampled ids stay verbatim. After a turn only what the template writes *behind* that turn is encoded and
appended: the turn separator, the new messages, the next generation prompt::

    rendered   <user> 2+2? <end>\\n<assistant> | 4 <end> | \\n<user> sure? <end>\\n<assistant>
    ids        opened                          | sampled | appended

A template that rewrites what it rendered before cannot be extended; `Chat.extend` says so with None, and
the caller opens a new segment.
"""

from collections.abc import Hashable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from agentgym.rollouts.delta import Deltas
from agentgym.rollouts.families import FAMILIES, HERMES, family_of
from agentgym.rollouts.parsing import message_of, plain_hermes, raw_call
from agentgym.rollouts.pieces import Decoder, Pieces
from agentgym.types import Message


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template and a parser for what the model writes; compared by identity."""

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
        self.reasoned = self.reasons = self.called = False
        for message in messages:
            self._note(message)
        self._text: str | None = None
        self._opened = len(self.messages)
        self._deltas = _deltas.setdefault(tokenizer, Deltas())
        self._read: tuple[Sequence[int], str] = ((), "")

    @property
    def text(self) -> str:
        """The chat as the template renders it, the assistant's turn open."""
        if self._text is None:
            self._text = self.tokenizer.render(self.messages, self.tools, generation=True)
        return self._text

    def prompt_ids(self) -> list[int]:
        """Ids of everything rendered so far, up to the open assistant's turn."""
        if len(self.messages) > self._opened:
            return self.tokenizer.encode(self.text)
        known = _openings.setdefault(self.tokenizer, {})
        opening = repr((self.messages, self.tools))
        if opening not in known:
            if len(known) >= _OPENINGS:
                known.clear()
            known[opening] = (self.text, self.tokenizer.encode(self.text))
        self._text, ids = known[opening]
        return list(ids)

    def branch(self) -> "Chat":
        """A chat that goes on from here without touching this one."""
        other = copy(self)
        other.messages = list(self.messages)
        return other

    def parse(self, token_ids: Sequence[int], *, stopped: bool) -> Message:
        """The assistant message in a turn's ids; `stopped`: the last id is the stop token."""
        ids = token_ids[:-1] if stopped else token_ids
        text = self.tokenizer.decode(ids)
        self._read = (ids, text)
        message = self.tokenizer.parse(text, self.tools)
        for i, call in enumerate(message.get("tool_calls", ())):
            # Nine letters and digits: what Mistral's templates insist on, and the others do not mind.
            call.setdefault("id", f"call{len(self.messages) % 1000:03}{i % 100:02}")
        return message

    def extend(self, token_ids: Sequence[int], reply: Message, new: Sequence[Message]) -> list[int] | None:
        """Ids the template puts behind a finished turn for `new` messages and the next turn's opening.

        `token_ids` is the turn as sampled, its stop token last. None where the template rewrote what is
        already there; the conversation has moved on all the same, and `prompt_ids` renders it whole.
        """
        end = self.tokenizer.decode(token_ids[-1:])
        body = self._body(token_ids[:-1])
        written = _renderable(reply)
        shape = self._shape(end, written, new)
        regular = bool(end) and end not in body
        short = partial(self._tried, [_QUESTION], [], end, written)
        text, added = None, self._deltas.recall(shape, new, short) if regular else None
        if added is None:
            text = self.tokenizer.render([*self.messages, written, *new], self.tools, generation=True)
            added = self._added(text, end, body, new)
            if regular:
                whole = partial(self._tried, self.messages, self.tools, end, written)
                self._deltas.learn(shape, new, added, whole, short)
        self._text = text
        for message in (written, *new):
            self.messages.append(message)
            self._note(message)
        return None if added is None else self.tokenizer.encode(added)

    def _body(self, ids: Sequence[int]) -> str:
        """The text of a turn before its end, decoded once."""
        return self._read[1] if ids == self._read[0] else self.tokenizer.decode(ids)

    def _note(self, message: Message) -> None:
        """Keep what a template may look back for: reasoning, since when, and calls."""
        if message["role"] == "user":
            self.reasons = False
        elif message.get("reasoning_content"):
            self.reasoned = self.reasons = True
        self.called = self.called or "tool_calls" in message

    def _shape(self, end: str, reply: Message, new: Sequence[Message]) -> Hashable:
        """What the text behind a turn depends on besides the contents of the new messages."""
        past = (bool(self.tools), self.messages[0]["role"] if self.messages else "", min(len(self.messages), 3))
        looks_back = (self.reasoned, self.reasons, self.called)
        calls = tuple([call["function"]["name"] for call in reply.get("tool_calls", ())])
        said = (bool(reply["content"]), bool(reply.get("reasoning_content")), calls)
        fields = tuple([(m["role"], m.get("name"), len(m), bool(m["content"])) for m in new])
        return (end, past, looks_back, said, fields)

    def _added(self, whole: str, end: str, body: str, new: Sequence[Message]) -> str | None:
        """What the whole chat holds behind the end of the reply; None where the template rewrote the rest."""
        start = len(self.text)
        if not whole.startswith(self.text):
            return None
        skip = body.count(end) if end else 0
        if skip:  # the model wrote the mark as text: count those that the template kept
            silent = Message(role="assistant", content="")
            bare = self.tokenizer.render([*self.messages, silent, *new], self.tools, generation=True)
            skip = whole.count(end, start) - bare.count(end, start)
        at = _after_nth(whole, end, start, skip)
        return None if at is None else whole[at:]

    def _tried(
        self,
        past: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        end: str,
        reply: Message,
        new: Sequence[Message],
    ) -> str | None:
        """What is added behind a reply without end marks in its text; None also where the template refuses."""
        try:
            before = self.tokenizer.render(past, tools, generation=True)
            whole = self.tokenizer.render([*past, reply, *new], tools, generation=True)
        except Exception:  # These are messages that nobody wrote.
            return None
        at = _after_nth(whole, end, len(before), 0) if whole.startswith(before) else None
        return None if at is None else whole[at:]


_QUESTION = Message(role="user", content="?")
_OPENINGS = 64
_openings: "WeakKeyDictionary[ChatTokenizer, dict[str, tuple[str, list[int]]]]" = WeakKeyDictionary()
"""First prompts, rendered and encoded: the rollouts of a group begin alike."""
_deltas: "WeakKeyDictionary[ChatTokenizer, Deltas]" = WeakKeyDictionary()


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


class HuggingFaceTokenizer:
    """A ChatTokenizer over a fast transformers tokenizer, its chat template and its response template."""

    def __init__(self, tokenizer: Any, response_template: dict[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer: has no chat_template")
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.tokenizer = tokenizer
        # The layer below: the wrappers around it cost more than they do, once a turn.
        self.backend = tokenizer.backend_tokenizer
        self.family = family_of(tokenizer.chat_template)
        template = response_template or getattr(tokenizer, "response_template", None)
        if template is None and self.family is not None:
            template = FAMILIES[self.family]
        self.response_template = None if template is None else load_response_template(template)
        self._hermes = template is HERMES
        self._pieces = Pieces(self.backend)
        self._decoder = Decoder(self.backend)
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
        return self._pieces.encode(text if text.isascii() else text.encode(errors="replace").decode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids)

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        if self.response_template is None:
            return Message(role="assistant", content=text)
        if self._hermes and (message := plain_hermes(text, tools)) is not None:
            return message
        try:
            parsed = self.tokenizer.parse_response(
                text, self.response_template, prefix=self.opening, tools=[*tools] or None
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return Message(role="assistant", content=text, tool_calls=[raw_call(text)])
        return message_of(text, parsed)
