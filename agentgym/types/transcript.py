"""Transcripts: a rollout's conversations as text, for terminals, failing tests and logs."""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentgym.errors import Failure
from agentgym.types.messages import Message, ToolCall, text_of

SHOWN_CHARACTERS = 2000
"""Maximum number of characters printed per message by default."""
SHOWN_CASES = 10
SHOWN_NAME = 200
"""Maximum number of failed hidden test cases printed, and of characters in the name of one."""
_STYLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}


@dataclass(frozen=True, slots=True)
class SegmentTranscript:
    """The messages of one segment: those it starts with, then each assistant message and its answer."""

    index: int
    kind: str
    parent: int | None
    """Index of the segment that this one continues; None for the root."""
    messages: tuple[Message, ...]
    opened: int = 0
    """Number of messages that the segment starts with; some of them may also be in its parent."""
    notes: tuple[str, ...] = ()
    """The speaker ("role white", "by judge"), "not trained" if its turns aren't, and the outcome of the branch."""

    @property
    def title(self) -> str:
        """The segment in a few words, such as "segment 2: compaction of segment 0"."""
        kind = self.kind if self.parent is None else f"{self.kind} of segment {self.parent}"
        return one_line(", ".join([f"segment {self.index}: {kind}", *self.notes]))

    def noted(self, note: str) -> "SegmentTranscript":
        """Return a copy with one more note."""
        return replace(self, notes=(*self.notes, note))


def shorten(text: str, limit: int | None) -> str:
    """Return the head and tail of the text, at most `limit` characters, with a line about the rest; None keeps all."""
    if limit is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} of {len(text)} characters not shown ...]\n{text[-half:]}"


def call_text(call: ToolCall) -> str:
    """Return a tool call as a line of code, such as `bash(cmd="ls")`, or the model's text if its JSON was invalid."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return _as_text(call)
    function: Mapping[str, Any] = call["function"]
    name, arguments = _as_text(function.get("name", "")), function.get("arguments", "")
    if not isinstance(arguments, dict):
        return f"{name}({_as_text(arguments)})"
    given = ", ".join(f"{key}={_as_json(value)}" for key, value in arguments.items())
    return f"{name}({given})"


def message_parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield each text of a message, as (label, text).

    The label is "thinking" for the reasoning, "" for the content, and "calls" for a tool call. A message without any
    text yields one empty text with the label "".
    """
    parts = list(_parts(message))
    yield from parts or [("", "")]


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    if thought := _as_text(message.get("reasoning_content", "")):
        yield "thinking", thought
    content: Any = message.get("content", "")
    if text := _parts_text(content) if isinstance(content, list) and content else _as_text(content):
        yield "", text
    made: Any = message.get("tool_calls")
    for call in made if isinstance(made, list | tuple) else [] if made is None else [made]:
        yield "calls", call_text(call)


def _parts_text(content: list[Any]) -> str:
    """Return parts as text, each image as a short description, and any other list as JSON."""
    try:
        return text_of(content)
    except (TypeError, LookupError, AttributeError):  # In a hand-written message, a list may contain anything.
        return _as_json(content)


def _as_text(value: object) -> str:
    """Return text unchanged, None as "", and anything else as JSON: a hand-written message may contain anything."""
    return "" if value is None else value if isinstance(value, str) else _as_json(value)


def _as_json(value: object) -> str:
    """Return the value as JSON, else its repr, or else the name of its type if its repr raises."""
    for write in (partial(json.dumps, ensure_ascii=False), repr):
        try:
            return write(value)
        except Exception:  # The value can be anything, so any error means: try the next way.
            continue
    return f"<{type(value).__name__}>"


def role_of(message: Message) -> str:
    """Return the message's role, followed by the tool's name if it has one, as in `tool bash`."""
    role, name = _as_text(message.get("role")) or "(no role)", _as_text(message.get("name"))
    return f"{role} {name}" if name else role


def plain_text(segments: Sequence[SegmentTranscript], *, limit: int | None = SHOWN_CHARACTERS) -> str:
    """Return the segments as plain text, one `role: text` per message, continuation lines indented.

    Messages that a segment took over from its parent are printed in the parent, and only counted in the segment.
    """
    lines: list[str] = []
    for segment, entries in _with_entries(segments):
        if len(segments) > 1:
            lines.append(f"--- {segment.title}")
        for entry in entries:
            if isinstance(entry, str):
                lines.append(entry)
                continue
            for what, text in message_parts(entry):
                lines.append(f"{_label(entry, what)}: " + shorten(text, limit).replace("\n", "\n    "))
    return printable("\n".join(lines))


def printable(text: str) -> str:
    """Return `text` with control characters and lone surrogates escaped, so that it can't control the terminal."""
    return "".join(c if c in "\n\t" or _is_shown(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str) -> str:
    """Return `text` as one line, newlines and control characters escaped, so that it can't forge log lines."""
    return printable(text).replace("\n", "\\n")


def counted(number: int, what: str) -> str:
    """Return a count with its noun: "1 turn", "2 turns"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size_text(turns: int, sampled: int, segments: int) -> str:
    """Return the size of a rollout, or of its branches, as text: "2 turns, 40 sampled tokens, 1 segment"."""
    return ", ".join([counted(turns, "turn"), counted(sampled, "sampled token"), counted(segments, "segment")])


def heading(rollout_id: str, reward: float | None, stop_reason: str, size: str) -> str:
    """Return one line with a rollout's id, its reward or "failed", its stop reason, and its size (`size_text`)."""
    worth = "failed" if reward is None else f"reward {reward:g}"
    return one_line(f"{rollout_id}: {worth}, stopped by {stop_reason}, {size}")


def outcome(
    rewards: Mapping[str, float],
    metrics: Mapping[str, float],
    failure: Failure | None,
    failed_cases: Mapping[str, str] | None = None,
    role_rewards: Mapping[str, float] | None = None,
) -> str:
    """Return the rewards by name and role, metrics, failed hidden tests and the failure with its traceback, as text."""
    given = [("rewards", rewards), ("rewards of roles", role_rewards or {}), ("metrics", metrics)]
    lines = [f"{name}: " + ", ".join(f"{k} {v:g}" for k, v in numbers.items()) for name, numbers in given if numbers]
    cases = list((failed_cases or {}).items())
    lines += [f"failed case {shorten(name, SHOWN_NAME)!r}: {why}" for name, why in cases[:SHOWN_CASES]]
    if len(cases) > SHOWN_CASES:
        lines.append(f"and {len(cases) - SHOWN_CASES} more failed cases (all are in rollout.failed_cases)")
    if failure is not None:
        lines += [f"failed: {failure}", failure.traceback.rstrip()]
    return printable("\n".join(filter(None, lines)))


def _is_shown(character: str) -> bool:
    # Python calls every space except U+0020 unprintable, and surrogates can't be encoded.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _label(message: Message, what: str) -> str:
    return one_line(f"{role_of(message)} {what}" if what else role_of(message))


def _with_entries(segments: Sequence[SegmentTranscript]) -> Iterator[tuple[SegmentTranscript, list[Message | str]]]:
    """Yield each segment with its messages; messages from its parent are replaced by a line that counts them."""
    by_index = {segment.index: segment for segment in segments}
    for segment in segments:
        parent = None if segment.parent is None else by_index.get(segment.parent)
        yield segment, list(_entries(segment, parent))


def _entries(segment: SegmentTranscript, parent: SegmentTranscript | None) -> Iterator[Message | str]:
    held, repeated = () if parent is None else parent.messages, 0
    for place, message in enumerate(segment.messages):
        if place < segment.opened and any(_are_equal(message, other) for other in held):
            repeated += 1
            continue
        if repeated:
            yield f"[{counted(repeated, 'message')} as in segment {segment.parent}]"
            repeated = 0
        yield message if isinstance(message, Mapping) else Message(role="(no message)", content=message)
    if repeated:
        yield f"[{counted(repeated, 'message')} as in segment {segment.parent}]"


def _are_equal(message: Message, other: Message) -> bool:
    try:
        return message is other or bool(message == other)
    except Exception:  # A hand-written message may contain values that can't be compared, such as arrays.
        return False


def show(
    head: str,
    segments: Sequence[SegmentTranscript],
    foot: str,
    *,
    limit: int | None = SHOWN_CHARACTERS,
    console: Any = None,
) -> None:
    """Print the segments, with colors if the terminal supports them; `console` is a rich Console, stdout by default."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    out = console or Console(highlight=False)
    out.print(Rule(Text(printable(head), style="bold"), align="left"))
    for segment, entries in _with_entries(segments):
        if len(segments) > 1:
            out.print(Text(segment.title, style="bold blue"))
        for entry in entries:
            if isinstance(entry, str):
                out.print(Text(printable(entry), style="dim"))
                continue
            for what, text in message_parts(entry):
                out.print(
                    Text(printable(_label(entry, what)), style=f"bold {_STYLES.get(_as_text(entry.get('role')), '')}")
                )
                out.print(Text(printable(shorten(text, limit)), style="dim" if what == "thinking" else ""))
    out.print(Text(printable(foot), style="bold"))
