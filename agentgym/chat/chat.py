"""The messages of one segment and their token ids, which only grow at the end.

Sampled ids are stored unchanged. After a turn, only the text that the template writes *after* it is encoded and
appended: the turn separator, the new messages and the next generation prompt::

    rendered   <user> 2+2? <end>\\n<assistant> | 4 <end> | \\n<user> sure? <end>\\n<assistant>
    ids        opened                          | sampled | appended

If a template rewrites text that it rendered earlier, the ids can't be extended. `Chat.extend` then returns None, and
the caller opens a new segment. Special tokens in a message's content are encoded as plain characters
(`agentgym.chat.special_tokens`). A conversation that the template rejects is rendered in another form
(`agentgym.chat.fitting`).
"""

from array import array
from collections.abc import Hashable, Sequence
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from agentgym.chat.fitting import check_messages, first_rendered, fits, history_forms, is_malformed, readable
from agentgym.chat.template import Opening, Template
from agentgym.chat.template_deltas import after_nth, ids_behind
from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.chat.tools_check import check_tools
from agentgym.types.messages import Message


class Chat:
    """Renders and encodes the messages of one segment, to which messages are only ever appended.

    Raises:
        ValueError: If there are tools, and the tokenizer refuses those that its chat template doesn't show.
    """

    def __init__(self, tokenizer: ChatTokenizer, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> None:
        if tools:
            check_tools(tokenizer)
        self.tokenizer, self.tools = tokenizer, tools
        self.messages = list(messages)
        self._shown = list(messages)
        """The messages in the form that the template accepted, which may differ from `messages`."""
        self._wordless: list[tuple[Message, Message]] = []
        """The turns that stand in `_shown` without their content, each with its message that has one."""
        self._template = template_of(tokenizer)
        self.seen: frozenset[tuple[str, str]] = frozenset()
        """Pairs of a role and a word. The template searches for the word, and a message of that role contains it."""
        self.reasoned = self.reasons = self.called = False
        for message in messages:
            self._note(message)
        self._text: str | None = None
        self._opened = len(self.messages)
        self._read: tuple[Sequence[int], str] = ((), "")

    @property
    def call_example(self) -> str:
        """A call as the model writes it; "" if the tokenizer doesn't know."""
        return getattr(self.tokenizer, "call_example", "")

    @property
    def text(self) -> str:
        """The rendered chat, ending with the opening of an assistant turn."""
        if self._text is None:
            self._hide_words()
            forms = ((form, form) for form in (self._shown, *history_forms(self._shown)))
            self._shown, self._text = first_rendered(self._rendered, forms)
        return self._text

    def prompt_ids(self) -> "array[int]":
        """Return the ids of the whole chat, up to and including the opening of the assistant turn."""
        if len(self.messages) > self._opened:
            return self._encoded(self.text)
        check_messages(self.messages)
        # The key contains everything that a first prompt depends on. Contents stay separate strings, because a string
        # caches its hash.
        others = [{name: value for name, value in message.items() if name != "content"} for message in self.messages]
        key = (repr((others, self.tools)), *[message["content"] for message in self.messages])
        known = self._template.openings.get(key)
        if known is None:
            text = self.text
            # Copies, because an env may change its messages later, and other rollouts start with these.
            known = Opening(text, [message.copy() for message in self._with_words()], self._encoded(text))
            self._template.remember(key, known)
        self._text, self._shown, self._wordless = known.text, list(known.shown), []
        return known.ids[:]

    def _encoded(self, text: str) -> "array[int]":
        return self._template.encode(self.tokenizer, text)

    def branch(self) -> "Chat":
        """Return an independent copy of the chat."""
        other = copy(self)
        other.messages, other._shown, other._wordless = list(self.messages), list(self._shown), list(self._wordless)
        return other

    def parse(self, token_ids: Sequence[int], *, stopped: bool) -> Message:
        """Parse a turn's ids into an assistant message, whose calls have only the ids that the model wrote.

        Args:
            token_ids: The turn's ids as sampled.
            stopped: Whether the last id is the stop token.
        """
        ids = token_ids[:-1] if stopped else token_ids
        text = self.tokenizer.decode(ids)
        self._read = (ids, text)
        return self.tokenizer.parse(text, self.tools)

    def extend(
        self,
        token_ids: Sequence[int],
        reply: Message,
        new: Sequence[Message],
        room: int | None = None,
        *,
        stopped: bool = True,
    ) -> "array[int] | None":
        """Append a finished turn and return the ids after it: the `new` messages and the next turn's opening.

        Args:
            token_ids: The turn's ids as sampled.
            reply: The turn's parsed message.
            new: The messages that answer the turn.
            room: Number of ids that the caller can use. If the text needs more, only slightly more ids than this are
                returned. None means no limit.
            stopped: Whether the last id of `token_ids` is the stop token. If not, the returned ids also contain
                everything that the template writes after the turn's text, including the end of the turn.

        Returns:
            The ids, or None if the template rewrote earlier text. The messages are added in either case. If the
            result is None, the next `prompt_ids` renders all of them.

        Raises:
            ValueError: If a message in `new` has a role or content that isn't allowed.
        """
        check_messages(new, answers=True)
        end = self._template.end_text(self.tokenizer, token_ids[-1]) if stopped else ""
        body = self._body(token_ids[:-1] if stopped else token_ids)
        written, told, as_calls = reply, new, False
        if is_malformed(reply):
            as_calls = self._template.wants_calls(self.tokenizer)
            written = readable(reply, as_calls=as_calls)
        else:
            reply = written = self._appendable(reply, new)
        added = self._recalled(end, body, written, new)
        if added is None:
            forms = fits(reply, body, new, as_calls=as_calls)
            whole = (((form, answer), [*self._shown, form, *answer]) for form, answer in forms)
            (written, told), text = first_rendered(self._rendered, whole)
            added = self._added(text, end, body, written, told) if stopped else self._behind(text, body)
            self._learn(end, body, written, told, added)
            self._text = text
        else:
            self._text = None
        if added is None:
            self._restore_words(written)
        self._append(written, told, new)
        if added is None:
            return None
        if not stopped or (self._template.alone and (room is None or len(added) <= 16 * room)):
            return self._encoded(added)
        return ids_behind(self._encoded, end, added, token_ids[-1], room)

    def _recalled(self, end: str, body: str, written: Message, new: Sequence[Message]) -> str | None:
        """Return the text that the template adds after a turn, if the cache knows turns of this shape.

        Args:
            end: The text of the turn's stop token, or "" if there is none.
            body: The text that the model sampled, without the stop token.
            written: The turn's message, in the form in which it is rendered.
            new: The messages that answer the turn.

        Returns:
            The text, or None if the whole chat must be rendered to find it.
        """
        if not self._is_regular(end, body, new):
            return None
        short = partial(self._tried, [_QUESTION], [], end, written)
        return self._template.deltas.recall(self._shape(end, written, new), new, short)

    def _learn(self, end: str, body: str, written: Message, new: Sequence[Message], added: str | None) -> None:
        if self._is_regular(end, body, new):
            short = partial(self._tried, [_QUESTION], [], end, written)
            whole = partial(self._tried, self._shown, self.tools, end, written)
            self._template.deltas.learn(self._shape(end, written, new), new, added, whole, short)

    def _is_regular(self, end: str, body: str, new: Sequence[Message]) -> bool:
        """Return whether the text after this turn may be cached, and used for all turns of the same shape.

        This is so if the turn ends with a stop token that the model's text doesn't contain, and if the new messages
        contain no word that the template searches for.
        """
        if not end or end in body:
            return False
        sought = self._template.sought
        return sought is None or not any(sought.search(message["content"]) for message in new)

    def _append(self, written: Message, told: Sequence[Message], new: Sequence[Message]) -> None:
        """Append a turn and its answer to `messages` and to `_shown`.

        Args:
            written: The turn's message, in the form that the template accepted.
            told: The answer in the form that the template accepted, for `_shown`.
            new: The answer in its original form, for `messages`.
        """
        self.messages += [next((full for short, full in self._wordless if short is written), written), *new]
        for message in (written, *told):
            self._shown.append(message)
            self._note(message)

    def _appendable(self, reply: Message, new: Sequence[Message]) -> Message:
        """Return the reply, without its content if the template writes that after the answer."""
        if not self._template.moves_words(self.tokenizer, reply, new):
            return reply
        wordless = reply.copy()
        wordless["content"] = ""
        self._wordless.append((wordless, reply))
        return wordless

    def _hide_words(self) -> None:
        """Show the last turn without its content if only results follow it, and the template writes that after them."""
        last = next((i for i in range(len(self._shown) - 1, -1, -1) if self._shown[i]["role"] != "tool"), 0)
        if self._shown[last:] and self._shown[last]["role"] == "assistant":
            self._shown[last] = self._appendable(self._shown[last], self._shown[last + 1 :])

    def _with_words(self) -> list[Message]:
        """Return the shown messages, with the contents of all turns."""
        full = {id(short): message for short, message in self._wordless}
        return [full.get(id(message), message) for message in self._shown]

    def _restore_words(self, last: Message) -> None:
        """Give turns in `_shown` their contents back, except for `last`, which isn't answered yet."""
        kept = [pair for pair in self._wordless if pair[0] is last]
        if len(kept) < len(self._wordless):
            self._shown, self._wordless, self._text = self._with_words(), kept, None

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.render(messages, self.tools, generation=True)

    def _body(self, ids: Sequence[int]) -> str:
        """Return the text of a turn's ids without the stop token. The most recently parsed turn isn't decoded again."""
        return self._read[1] if ids == self._read[0] else self.tokenizer.decode(ids)

    def _note(self, message: Message) -> None:
        """Record what a template may look back for in a message: reasoning, calls and the words it searches for."""
        if message["role"] == "user":
            self.reasons = False
        elif message.get("reasoning_content"):
            self.reasoned = self.reasons = True
        self.called = self.called or "tool_calls" in message
        content = message["content"]
        if self._template.sought is not None and isinstance(content, str) and self._template.sought.search(content):
            self.seen |= {(message["role"], word) for word in self._template.sought.findall(content)}

    def _shape(self, end: str, reply: Message, new: Sequence[Message]) -> Hashable:
        """Return a turn's shape: everything that the text after it depends on, except the new messages' contents."""
        shown, calls = self._shown, reply.get("tool_calls")
        past = (bool(self.tools), shown[0]["role"] if shown else "", min(len(shown), 3))
        looks_back = (self.reasoned, self.reasons, self.called, self.seen)
        names = tuple([call["function"]["name"] for call in calls]) if calls else ()
        said = (bool(reply["content"]), bool(reply.get("reasoning_content")), names)
        fields = tuple([(m["role"], m.get("name"), len(m), bool(m["content"])) for m in new])
        return (end, past, looks_back, said, fields)

    def _added(self, whole: str, end: str, body: str, reply: Message, new: Sequence[Message]) -> str | None:
        """Return the text that the template adds after a turn that ends with a stop token.

        Args:
            whole: The rendered chat, including the turn and the new messages.
            end: The text of the stop token.
            body: The text that the model sampled, without the stop token.
            reply: The turn's message.
            new: The messages that answer the turn.

        Returns:
            The text, or None if the template rewrote earlier text, or doesn't write `end` directly after the turn.
        """
        start = len(self.text)
        if not whole.startswith(self.text) or not self._template.ends(self.tokenizer, end, reply, new):
            return None
        skip = body.count(end) if end else 0
        if skip:  # the model wrote the end token as text, so find out how often the template rendered it
            silent = Message(role="assistant", content="")
            try:
                bare = self._rendered([*self._shown, silent, *new])
            except Exception:  # We built these messages, so a template error isn't the env's fault.
                return None
            skip = whole.count(end, start) - bare.count(end, start)
        at = after_nth(whole, end, start, skip)
        return None if at is None else whole[at:]

    def _behind(self, whole: str, body: str) -> str | None:
        """Return the text that the template adds after a turn that has no stop token.

        Args:
            whole: The rendered chat, including the turn and the new messages.
            body: The text that the model sampled.

        Returns:
            The text, or None if the template changed the turn's text or earlier text.
        """
        before = self.text + body
        return whole[len(before) :] if whole.startswith(before) else None

    def _tried(
        self,
        past: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        end: str,
        reply: Message,
        new: Sequence[Message],
    ) -> str | None:
        """Render a chat of `past`, `reply` and `new`, and return the text that the template adds after `reply`.

        Args:
            past: The messages before the reply.
            tools: The schemas of the tools.
            end: The text of the stop token. The reply's own text must not contain it.
            reply: The assistant message after which the added text begins.
            new: The messages that answer the reply.

        Returns:
            The text, or None if the template rewrote earlier text or raised an error.
        """
        try:
            whole = self.tokenizer.render([*past, reply, *new], tools, generation=True)
            asked, before = [*past, *tools] == [_QUESTION], self._template.asked
            if not (asked and whole.startswith(before)):
                before = self.tokenizer.render(past, tools, generation=True)
            self._template.asked = before if asked else self._template.asked
        except Exception:  # We built these messages, so a template error isn't the env's fault.
            return None
        at = after_nth(whole, end, len(before), 0) if whole.startswith(before) else None
        return None if at is None else whole[at:]


_QUESTION = Message(role="user", content="?")
_templates: "WeakKeyDictionary[ChatTokenizer, Template]" = WeakKeyDictionary()


def template_of(tokenizer: ChatTokenizer) -> Template:
    """Return the facts about the tokenizer's template, cached for the tokenizer's lifetime."""
    known = _templates.get(tokenizer)
    if known is None:
        known = _templates[tokenizer] = Template(tokenizer)
    return known
