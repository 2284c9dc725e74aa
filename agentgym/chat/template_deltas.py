"""A cache of the text that a chat template adds after a finished turn, by the shape of the turn.

Rendering a whole chat to find out what its last message added costs more than all other work of a turn. Most of the
added text is the same each time::

    \\n<user>\\n<tool_response>\\n | 57 | \\n</tool_response><end>\\n<assistant>\\n
    piece                        slot  piece

The shape of a turn is everything that the added text depends on besides the new messages' contents: roles, names, and
whether there are calls, reasoning or tools. The pieces and slots of one shape form a `MessageTemplate`. It is used only
for plain contents, and only after renders of the whole chat with other contents gave the same text. Contents with other
characters, such as code and JSON, also use it if a render with such characters gave the same text, and if they contain
no text from the template's own source.

All other turns are rendered after one question instead of the whole chat, if renders of whole chats showed that this
makes no difference. Each entry is checked again on uses 1, 2, 4, 8, ..., and discarded if it is wrong. The ids used for
training don't depend on the cache: they are the engine's actual inputs and samples. A wrong entry could only change how
a message is rendered.
"""

import re
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from agentgym.types.messages import Message

Slot = tuple[int, str]
"""A field of one of the new messages: its index and its key."""
Render = Callable[[Sequence[Message]], str | None]
"""A function that returns the text that a chat template adds for new messages, or None if it rewrote earlier text."""

Passes = Callable[[Message], bool]

PLAIN = re.compile(r"[\w.,:;!?()+*/=%-](?:[\w .,:;!?()+*/=%\n-]*[\w.,:;!?()+*/=%-])?")
"""Matches plain text, which no template is known to trim, escape, split or search."""
SIGNS = re.compile(r"[\w!-~](?:[\w\t\n -~]*[\w!-~])?")
"""Matches text that may contain any visible ASCII character. Like plain text, it doesn't start or end with a space."""
_SAMPLE = """{} 'a' "b" [c] {{{{d}}}} <e> f&g h|i j\\k #l @m $n ^o ~p `q` </r> "s": [1, {{"t": "u"}}];\n\t<v>"""
"""A text that contains each punctuation character at least once."""
_FIELDS = ("content", "tool_call_id")
_KNOWN = 1024
"""Maximum number of cached shapes, because a model can invent an unlimited number of names."""


@dataclass(slots=True)
class MessageTemplate:
    """The text that a chat template adds for one shape of turn: fixed pieces, and slots for texts of the new messages.

    There is one more piece than there are slots.
    """

    pieces: tuple[str, ...]
    slots: tuple[Slot, ...]
    passes: Passes | None = None
    """Returns whether a content that isn't plain appears unchanged in the rendered text; None if this is known only for
    plain contents.
    """

    def fill(self, new: Sequence[Message]) -> str | None:
        """Return the added text for these messages, or None if the chat template may change a slot's text."""
        parts = [self.pieces[0]]
        for (index, field), piece in zip(self.slots, self.pieces[1:], strict=True):
            text: str = new[index][field]  # type: ignore[literal-required]
            if not PLAIN.fullmatch(text) and not (field == "content" and self._may_pass(new[index])):
                return None
            parts += (text, piece)
        return "".join(parts)

    def _may_pass(self, message: Message) -> bool:
        return self.passes is not None and bool(SIGNS.fullmatch(message["content"])) and self.passes(message)


@dataclass(slots=True)
class KnownTemplate:
    """One shape of turn in the cache, with its number of uses."""

    template: MessageTemplate | None
    """The pieces and slots; None if contents don't appear unchanged in the rendered text."""
    short: bool
    """Whether a render after one question adds the same text as a render of the whole chat."""
    uses: int = 0

    def recall(self, new: Sequence[Message], short: Render) -> str | None:
        """Return the text that is added for these messages, or None if the whole chat must be rendered.

        `short` renders the messages after one question instead of the whole chat.
        """
        self.uses += 1
        if self.uses & (self.uses - 1) == 0:  # a power of two: time to check the entry
            return None
        filled = self.template.fill(new) if self.template else None
        return short(new) if filled is None and self.short else filled

    def check(self, new: Sequence[Message], short: Render, added: str | None) -> None:
        """Discard the parts of the entry that would have given another text than `added`.

        Args:
            new: The messages.
            short: Renders the messages after one question instead of the whole chat.
            added: The text that a render of the whole chat added for the messages.
        """
        if self.template and self.template.fill(new) not in (None, added):
            self.template = None
        self.short = self.short and short(new) == added


class TemplateDeltaCache:
    """The known shapes of turn for one tokenizer's chat template.

    `passes` returns whether a content that isn't plain contains nothing that the template or the tokenizer searches
    for.
    """

    def __init__(self, passes: Passes | None = None) -> None:
        self.known: dict[Hashable, KnownTemplate] = {}
        self.passes = passes

    def recall(self, shape: Hashable, new: Sequence[Message], short: Render) -> str | None:
        """Return the text added after a turn of this shape.

        Returns:
            The text, or None if the caller must render the whole chat and call `learn`.
        """
        known = self.known.get(shape)
        return None if known is None else known.recall(new, short)

    def learn(self, shape: Hashable, new: Sequence[Message], added: str | None, whole: Render, short: Render) -> None:
        """Check a known shape against `added`, or try to find the pieces of a new shape.

        `added` is the text that a render of the whole chat added. `whole` renders other messages after the whole chat,
        `short` after one question.
        """
        known = self.known.get(shape)
        if known is not None:
            known.check(new, short, added)
        elif len(self.known) < _KNOWN:
            template = None if added is None else _message_template(new, whole, self.passes)
            self.known[shape] = KnownTemplate(template, added is not None and short(new) == added)
            self.known[shape].check(new, short, added)


def _message_template(new: Sequence[Message], tail: Render, passes: Passes | None) -> MessageTemplate | None:
    """Return the pieces and slots for messages like these, or None if contents don't appear unchanged.

    Args:
        new: The messages.
        tail: Renders any messages in the place of `new`, and returns the text that the template adds for them.
        passes: Stored in the result if a content with punctuation also appears unchanged.
    """
    slots = tuple((i, field) for i, message in enumerate(new) for field in _FIELDS if message.get(field))
    made = _cut(slots, new, tail)
    if made is None:
        return None
    other = _filled(new, slots, "{} of 2:\nthé, (b) = 1")
    if made.fill(other) != tail(other):
        return None
    signs, wide = _filled(new, slots, _SAMPLE, ("content",)), replace(made, passes=passes)
    return wide if wide.fill(signs) == tail(signs) else made


def _cut(slots: tuple[Slot, ...], new: Sequence[Message], tail: Render) -> MessageTemplate | None:
    """Find the pieces and slots by a render in which every slot contains a unique marker.

    Args:
        slots: The fields of the messages that contain text.
        new: The messages.
        tail: Renders any messages in the place of `new`, and returns the text that the template adds for them.

    Returns:
        The pieces and slots, or None if a content doesn't appear unchanged, exactly once, in the rendered text.
    """
    text = tail(_filled(new, slots, "Qzx{}xzQ"))
    if text is None:
        return None
    pieces, shown = [], []
    for n, slot in enumerate(slots):
        piece, mark, text = text.partition(f"Qzx{n}xzQ")
        if mark:
            pieces.append(piece)
            shown.append(slot)
        elif slot[1] == "content":
            return None
        else:  # the template doesn't render this field: continue with the same text
            text = piece
    made = MessageTemplate((*pieces, text), tuple(shown))
    return None if any("Qzx" in piece for piece in made.pieces) else made


def _filled(new: Sequence[Message], slots: Sequence[Slot], form: str, fields: Sequence[str] = _FIELDS) -> list[Message]:
    """Return copies of the messages with other texts in their slots.

    Args:
        new: The messages.
        slots: The slots.
        form: The text for each slot. Its `{}` is replaced by the slot's number.
        fields: The keys of the fields to replace. Slots of other fields keep their texts.
    """
    filled = [message.copy() for message in new]
    for n, (index, field) in enumerate(slots):
        if field not in fields:
            continue
        filled[index][field] = form.format(n)  # type: ignore[literal-required]
    return filled


def after_nth(text: str, mark: str, start: int, skip: int) -> int | None:
    """Return the index at which an occurrence of `mark` ends, or None if there are too few.

    Args:
        text: The text to search.
        mark: The text to find. If it is "", the result is None.
        start: The index at which the search starts.
        skip: Number of occurrences to skip.
    """
    if not mark:
        return None
    for _ in range(skip + 1):
        found = text.find(mark, start)
        if found < 0:
            return None
        start = found + len(mark)
    return start


def ids_behind(
    encode: "Callable[[str], array[int]]", end: str, added: str, last: int, room: int | None = None
) -> "array[int]":
    """Return the ids of the text after a turn's end, without those of the end.

    The ids are the ones that this text has when it is encoded together with the end. If `room` is given, a long text
    is encoded only until it fills the room, plus a margin. The rest would be dropped anyway.

    Args:
        encode: Encodes a text.
        end: The text of the turn's end.
        added: The text after the turn's end.
        last: The id of the turn's end. If the end is encoded to another id, the added text is encoded alone.
        room: Number of ids that the caller can use; None means no limit.
    """
    length = len(added) if room is None else max(16 * room, _LONG)
    while True:
        ids = encode(end + added[:length])
        ids = ids[1:] if ids and ids[0] == last else encode(added[:length])
        if room is None or length >= len(added) or len(ids) > room + _MARGIN:
            return ids
        length *= 4


_LONG = 1 << 14
"""Number of characters that are encoded in any case, however small the room is."""
_MARGIN = 256
"""Number of ids that are encoded beyond the room, because near a cut they may differ from those of the whole text."""
