"""Messages to token ids and back, append-only.

Sampled ids stay verbatim. After a turn only what the template writes *behind* that turn is encoded and
appended: the turn separator, the new messages, the next generation prompt::

    rendered   <user> 2+2? <end>\\n<assistant> | 4 <end> | \\n<user> sure? <end>\\n<assistant>
    ids        opened                          | sampled | appended

A template that rewrites what it rendered before cannot be extended; `Chat.extend` says so with None, and
the caller opens a new segment. Marks in contents are broken in what is rendered and written in letters in the ids
(`agentgym.rollouts.marks`), and what a template refuses is shown to it in another form (`agentgym.rollouts.fitting`).
"""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from agentgym.rollouts.delta import PLAIN, Deltas, after_nth, ids_behind
from agentgym.rollouts.families import FAMILIES, HERMES, family_of
from agentgym.rollouts.fitting import check_messages, first_rendered, fits, history_forms, is_malformed, readable
from agentgym.rollouts.letters import Letters
from agentgym.rollouts.marks import BREAK, Marks
from agentgym.rollouts.parsing import message_of, plain_hermes, raw_call, thinks
from agentgym.rollouts.pieces import Decoder, Pieces
from agentgym.rollouts.reading import completed, may_call
from agentgym.rollouts.sought import sought_words
from agentgym.rollouts.template import Template, template_variables
from agentgym.sound_json import whole_characters
from agentgym.types import Message


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template and a parser for what the model writes; compared by identity."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        """The chat as text; `generation` opens the assistant's turn at its end.

        Every mark that a content holds is broken (`Marks.guarded`), so that `encode` writes it in letters.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: whole marks are special tokens, broken ones letters; nothing is added.

        Half a character, which no bytes stand for, is encoded as U+FFFD.
        """
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
        self._shown = list(messages)
        """The messages in the form that the template takes."""
        self._deltas = _deltas.setdefault(tokenizer, Deltas())
        self._template = _template_of(tokenizer)
        self.seen: frozenset[tuple[str, str]] = frozenset()
        """The words which the template looks for that stood in the messages, with the roles of these."""
        self.reasoned = self.reasons = self.called = False
        for message in messages:
            self._note(message)
        self._text: str | None = None
        self._opened = len(self.messages)
        self._read: tuple[Sequence[int], str] = ((), "")

    @property
    def text(self) -> str:
        """The chat as the template renders it, the assistant's turn open."""
        if self._text is None:
            forms = ((form, form) for form in (self._shown, *history_forms(self._shown)))
            self._shown, self._text = first_rendered(self._rendered, forms)
        return self._text

    def prompt_ids(self) -> list[int]:
        """Ids of everything rendered so far, up to the open assistant's turn."""
        if len(self.messages) > self._opened:
            return self.tokenizer.encode(self.text)
        check_messages(self.messages)
        known = _openings.setdefault(self.tokenizer, {})
        opening = repr((self.messages, self.tools))
        if opening not in known:
            if len(known) >= _OPENINGS:
                known.clear()
            known[opening] = (self.text, self._shown, self.tokenizer.encode(self.text))
        self._text, shown, ids = known[opening]
        self._shown = list(shown)
        return list(ids)

    def branch(self) -> "Chat":
        """A chat that goes on from here without touching this one."""
        other = copy(self)
        other.messages, other._shown = list(self.messages), list(self._shown)
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

    def extend(
        self, token_ids: Sequence[int], reply: Message, new: Sequence[Message], room: int | None = None
    ) -> list[int] | None:
        """Ids the template puts behind a finished turn for `new` messages and the next turn's opening.

        `token_ids` is the turn as sampled, its stop token last. None where the template rewrote what is
        already there; the conversation has moved on all the same, and `prompt_ids` renders it whole. Where more ids
        follow than there is `room` for, only some more than fit are made.
        """
        check_messages(new, answers=True)
        end = self.tokenizer.decode(token_ids[-1:])
        body = self._body(token_ids[:-1])
        written, told, as_calls = reply, new, False
        if is_malformed(reply):
            as_calls = self._template.wants_calls(self.tokenizer)
            written = readable(reply, as_calls=as_calls)
        added = self._recalled(end, body, written, new)
        if added is None:
            forms = fits(reply, body, new, as_calls=as_calls)
            whole = (((form, answer), [*self._shown, form, *answer]) for form, answer in forms)
            (written, told), text = first_rendered(self._rendered, whole)
            added = self._added(text, end, body, written, told)
            self._learn(end, body, written, told, added)
            self._text = text
        else:
            self._text = None
        self._append(written, told, new)
        if added is None:
            return None
        if self._template.alone and (room is None or len(added) <= 16 * room):
            return self.tokenizer.encode(added)
        return ids_behind(self.tokenizer.encode, end, added, token_ids[-1], room)

    def _recalled(self, end: str, body: str, written: Message, new: Sequence[Message]) -> str | None:
        """What is remembered of turns like this one; None where the whole chat must be rendered."""
        if not self._is_regular(end, body, new):
            return None
        short = partial(self._tried, [_QUESTION], [], end, written)
        return self._deltas.recall(self._shape(end, written, new), new, short)

    def _learn(self, end: str, body: str, written: Message, new: Sequence[Message], added: str | None) -> None:
        if self._is_regular(end, body, new):
            short = partial(self._tried, [_QUESTION], [], end, written)
            whole = partial(self._tried, self._shown, self.tools, end, written)
            self._deltas.learn(self._shape(end, written, new), new, added, whole, short)

    def _is_regular(self, end: str, body: str, new: Sequence[Message]) -> bool:
        """Whether the template can be expected to add what it added for turns of the same shape."""
        if not end or end in body:
            return False
        sought = self._template.sought
        return sought is None or not any(sought.search(message["content"]) for message in new)

    def _append(self, written: Message, told: Sequence[Message], new: Sequence[Message]) -> None:
        """Take up a turn and its answer: as they were, and as the template was shown them."""
        self.messages += [written, *new]
        for message in (written, *told):
            self._shown.append(message)
            self._note(message)

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.render(messages, self.tools, generation=True)

    def _body(self, ids: Sequence[int]) -> str:
        """The text of a turn before its end, decoded once."""
        return self._read[1] if ids == self._read[0] else self.tokenizer.decode(ids)

    def _note(self, message: Message) -> None:
        """Keep what a template may look back for: reasoning, since when, calls, and the words it looks for."""
        if message["role"] == "user":
            self.reasons = False
        elif message.get("reasoning_content"):
            self.reasoned = self.reasons = True
        self.called = self.called or "tool_calls" in message
        content = message["content"]
        if self._template.sought is not None and isinstance(content, str) and self._template.sought.search(content):
            self.seen |= {(message["role"], word) for word in self._template.sought.findall(content)}

    def _shape(self, end: str, reply: Message, new: Sequence[Message]) -> Hashable:
        """What the text behind a turn depends on besides the contents of the new messages."""
        past = (bool(self.tools), self._shown[0]["role"] if self._shown else "", min(len(self._shown), 3))
        looks_back = (self.reasoned, self.reasons, self.called, self.seen)
        calls = tuple([call["function"]["name"] for call in reply.get("tool_calls", ())])
        said = (bool(reply["content"]), bool(reply.get("reasoning_content")), calls)
        fields = tuple([(m["role"], m.get("name"), len(m), bool(m["content"])) for m in new])
        return (end, past, looks_back, said, fields)

    def _added(self, whole: str, end: str, body: str, reply: Message, new: Sequence[Message]) -> str | None:
        """What the whole chat holds behind the end of the reply; None where the template rewrote the rest."""
        start = len(self.text)
        if not whole.startswith(self.text) or not self._template.ends(self.tokenizer, end, reply, new):
            return None
        skip = body.count(end) if end else 0
        if skip:  # the model wrote the mark as text: count those that the template kept
            silent = Message(role="assistant", content="")
            try:
                bare = self._rendered([*self._shown, silent, *new])
            except Exception:  # These are messages that nobody wrote.
                return None
            skip = whole.count(end, start) - bare.count(end, start)
        at = after_nth(whole, end, start, skip)
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
            whole = self.tokenizer.render([*past, reply, *new], tools, generation=True)
            asked, before = [*past, *tools] == [_QUESTION], self._template.asked
            if not (asked and whole.startswith(before)):
                before = self.tokenizer.render(past, tools, generation=True)
            self._template.asked = before if asked else self._template.asked
        except Exception:  # These are messages that nobody wrote.
            return None
        at = after_nth(whole, end, len(before), 0) if whole.startswith(before) else None
        return None if at is None else whole[at:]


_QUESTION = Message(role="user", content="?")
_OPENINGS = 64
_openings: "WeakKeyDictionary[ChatTokenizer, dict[str, tuple[str, list[Message], list[int]]]]" = WeakKeyDictionary()
"""First prompts, rendered and encoded: the rollouts of a group begin alike."""
_deltas: "WeakKeyDictionary[ChatTokenizer, Deltas]" = WeakKeyDictionary()
_templates: "WeakKeyDictionary[ChatTokenizer, Template]" = WeakKeyDictionary()


def _template_of(tokenizer: ChatTokenizer) -> Template:
    """What is known of the tokenizer's template, asked once."""
    if tokenizer not in _templates:
        _templates[tokenizer] = Template(tokenizer)
    return _templates[tokenizer]


class HuggingFaceTokenizer:
    """A ChatTokenizer over a fast transformers tokenizer, its chat template and its response template.

    `chat_template_kwargs` are variables of the template: {"enable_thinking": False}.
    """

    def __init__(
        self,
        tokenizer: Any,
        response_template: dict[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer: has no chat_template")
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.tokenizer = tokenizer
        self.variables = template_variables(chat_template_kwargs or {})
        # The layer below: the wrappers around it cost more than they do, once a turn.
        self.backend = tokenizer.backend_tokenizer
        source = tokenizer.get_chat_template()
        self.family = family_of(source)
        template = response_template or getattr(tokenizer, "response_template", None)
        if template is None and self.family is not None:
            template = FAMILIES[self.family]
        self.response_template = None if template is None else load_response_template(template)
        self._family_reads = template is FAMILIES.get(self.family or "")
        self._pieces, self._letters = Pieces(self.backend), Letters(self.backend)
        self.cuts_at_marks = self._pieces.pattern is not None
        self._decoder = Decoder(self.backend)
        self.marks = Marks(())
        self.marks = self._marks()
        self.sought = sought_words(source) | {mark for mark in self.marks.every if PLAIN.fullmatch(mark)}
        self.opening = self._opening()
        self._prefix = self._read_prefix()
        self._quick = template is HERMES and not thinks(self._prefix)

    def _marks(self) -> Marks:
        """Every added token; those that are special, and those around a user's message, say whose turn it is."""
        added = self.backend.get_added_tokens_decoder().values()
        frame = self.render([Message(role="user", content="")], [], generation=False)
        turns = [token.content for token in added if token.special or token.content in frame]
        return Marks([token.content for token in added], turns)

    def _opening(self) -> str:
        """What the template writes to open an assistant's turn."""
        ask = [Message(role="user", content="")]
        closed = self.render(ask, [], generation=False)
        return self.render(ask, [], generation=True).removeprefix(closed)

    def _read_prefix(self) -> str:
        """What a reply is read behind: the opening, without what the reader would take for the reply's own text."""
        if self.response_template is None:
            return ""
        read = self.tokenizer.parse_response("", self.response_template, prefix=self.opening)
        anchor = self.response_template.start_anchor_re.search(self.opening)
        leaks = bool(read.get("content")) and anchor is not None
        return self.opening[: anchor.end()] if leaks else self.opening

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            self.marks.guarded(messages),
            tools=self.marks.guarded_tools(tools) or None,
            tokenize=False,
            add_generation_prompt=generation,
            **self.variables,
        )
        return text

    def encode(self, text: str) -> list[int]:
        text = whole_characters(text)
        return self._letters.encode(text) if BREAK in text else self._pieces.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids)

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        if self._quick and (message := plain_hermes(text, tools)) is not None:
            return message
        if self.response_template is None or (self._family_reads and not may_call(self.family, text, tools)):
            return Message(role="assistant", content=text)
        try:
            parsed = self.tokenizer.parse_response(
                text, self.response_template, prefix=self._prefix, tools=[*tools] or None
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return Message(role="assistant", content=text, tool_calls=[raw_call(text)])
        message = message_of(text, parsed)
        if self._family_reads:
            message = completed(self.family, text, message)
        return message
