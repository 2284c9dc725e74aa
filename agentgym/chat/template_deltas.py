"""What a template writes behind a finished turn, remembered by the shape of the turn.

Rendering a whole chat to learn what its last message added costs more than everything else a turn does. Most of
what is added is the same each time::

    \\n<user>\\n<tool_response>\\n | 57 | \\n</tool_response><end>\\n<assistant>\\n
    piece                        slot  piece

A skeleton is trusted for one shape of turn (roles, names, whether there are calls, reasoning, tools), only for plain
contents, and only after whole renders with other contents proved it. Contents that are not plain are rendered behind
one question instead of the whole chat, where whole renders proved that this makes no difference. Both are proved
again at every power of two of their uses, and where one is wrong it is never used again. Which ids are trained does
not depend on this: ids are what the engine was given and what it sampled. What a wrong skeleton could change is how a
message is shown.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from agentgym.messages import Message

Slot = tuple[int, str]
"""A field of one of the new messages: its index and its key."""
Tail = Callable[[Sequence[Message]], str | None]
"""What whole renders say is added for these messages; None where the template rewrote what was there."""

PLAIN = re.compile(r"[\w.,:;!?()+*/=%-](?:[\w .,:;!?()+*/=%\n-]*[\w.,:;!?()+*/=%-])?")
"""Text that no template is known to trim, escape, split or look into."""
_FIELDS = ("content", "tool_call_id")
_KNOWN = 1024
"""More shapes than this are not remembered: a model can make names up."""


@dataclass(slots=True)
class MessageTemplate:
    """The pieces around the slots, one more than there are slots."""

    pieces: tuple[str, ...]
    slots: tuple[Slot, ...]

    def fill(self, new: Sequence[Message]) -> str | None:
        """The text for these messages; None where a slot's text is not plain."""
        parts = [self.pieces[0]]
        for (index, field), piece in zip(self.slots, self.pieces[1:], strict=True):
            text: str = new[index][field]  # type: ignore[literal-required]
            if not PLAIN.fullmatch(text):
                return None
            parts += (text, piece)
        return "".join(parts)


@dataclass(slots=True)
class KnownTemplate:
    """What is known of one shape of turn."""

    skeleton: MessageTemplate | None
    """None: contents do not pass through unchanged."""
    short: bool
    """Whether a render behind one question shows the same as that of the whole chat."""
    uses: int = 0

    def recall(self, new: Sequence[Message], short: Tail) -> str | None:
        """What is added for these messages; None where the whole chat must be rendered."""
        self.uses += 1
        if self.uses & (self.uses - 1) == 0:  # it is time for a proof
            return None
        filled = self.skeleton.fill(new) if self.skeleton else None
        return short(new) if filled is None and self.short else filled

    def prove(self, new: Sequence[Message], short: Tail, added: str | None) -> None:
        """Never again use what would have been wrong here."""
        if self.skeleton and self.skeleton.fill(new) not in (None, added):
            self.skeleton = None
        self.short = self.short and short(new) == added


class TemplateDeltaCache:
    """What is known of one tokenizer's template, by the shape of a turn."""

    def __init__(self) -> None:
        self.known: dict[Hashable, KnownTemplate] = {}

    def recall(self, shape: Hashable, new: Sequence[Message], short: Tail) -> str | None:
        """What is added behind a turn of this shape; None where it must be rendered whole, and then `learn`ed."""
        known = self.known.get(shape)
        return None if known is None else known.recall(new, short)

    def learn(self, shape: Hashable, new: Sequence[Message], added: str | None, whole: Tail, short: Tail) -> None:
        """Take in what a whole render added: a shape that was not seen before is tried out, others are proved."""
        known = self.known.get(shape)
        if known is not None:
            known.prove(new, short, added)
        elif len(self.known) < _KNOWN:
            skeleton = None if added is None else _message_template(new, whole)
            self.known[shape] = KnownTemplate(skeleton, added is not None and short(new) == added)
            self.known[shape].prove(new, short, added)


def _message_template(new: Sequence[Message], tail: Tail) -> MessageTemplate | None:
    """The skeleton of what is added for messages like these; None where contents do not pass through unchanged."""
    slots = tuple((i, field) for i, message in enumerate(new) for field in _FIELDS if message.get(field))
    made = _cut(slots, new, tail)
    if made is None:
        return None
    other = _filled(new, slots, "{} of 2:\nthé, (b) = 1")
    return made if made.fill(other) == tail(other) else None


def _cut(slots: tuple[Slot, ...], new: Sequence[Message], tail: Tail) -> MessageTemplate | None:
    """Pieces and slots, read off a render in which every slot holds a mark of its own."""
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
        else:  # not shown: the rest is still to be cut
            text = piece
    made = MessageTemplate((*pieces, text), tuple(shown))
    return None if any("Qzx" in piece for piece in made.pieces) else made


def _filled(new: Sequence[Message], slots: Sequence[Slot], form: str) -> list[Message]:
    """The messages with a text of this form in each slot."""
    filled = [message.copy() for message in new]
    for n, (index, field) in enumerate(slots):
        filled[index][field] = form.format(n)  # type: ignore[literal-required]
    return filled


def after_nth(text: str, mark: str, start: int, skip: int) -> int | None:
    """Where the mark after `skip` others ends; None where there are not that many."""
    if not mark:
        return None
    for _ in range(skip + 1):
        found = text.find(mark, start)
        if found < 0:
            return None
        start = found + len(mark)
    return start


def ids_behind(
    encode: Callable[[str], list[int]], end: str, added: str, last: int, room: int | None = None
) -> list[int]:
    """Ids of the text that follows a turn's end, as they are behind it; `last` is the end's own id.

    Of a long text only as much is encoded as fills the room, and some more: the rest would be thrown away.
    """
    length = len(added) if room is None else max(16 * room, _LONG)
    while True:
        ids = encode(end + added[:length])
        ids = ids[1:] if ids and ids[0] == last else encode(added[:length])
        if room is None or length >= len(added) or len(ids) > room + _MARGIN:
            return ids
        length *= 4


_LONG = 1 << 14
_MARGIN = 256
"""Ids near the place of the cut may be others than those of the whole text: these are behind the room."""
