"""Transcripts: the conversations of a rollout as text, for terminals, failing tests and logs."""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentgym.errors import Failure
from agentgym.types.messages import Message, ToolCall, text_of

SHOWN_CHARACTERS = 2000
"""The most characters that are shown of a message, where a reader did not ask for all of it."""
SHOWN_CASES = 10
SHOWN_NAME = 200
"""The most failed cases of hidden tests that are shown, and characters of the name of one."""
_STYLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}


@dataclass(frozen=True, slots=True)
class SegmentTranscript:
    """The messages of one segment: those that it opened with, then each assistant message and its answer."""

    index: int
    kind: str
    parent: int | None
    """Index of the segment that this one continues; None for the root."""
    messages: tuple[Message, ...]
    opened: int = 0
    """The number of messages that it opened with; some of them may stand in its parent, too."""
    notes: tuple[str, ...] = ()
    """Who speaks in it, such as "role white" or "by judge", whether it is not trained, and what its branch came to."""

    @property
    def title(self) -> str:
        """The segment in a few words, such as "segment 2: compaction of segment 0"."""
        kind = self.kind if self.parent is None else f"{self.kind} of segment {self.parent}"
        return one_line(", ".join([f"segment {self.index}: {kind}", *self.notes]))

    def noted(self, note: str) -> "SegmentTranscript":
        """The same with one note more."""
        return replace(self, notes=(*self.notes, note))


def shorten(text: str, limit: int | None) -> str:
    """The text with at most `limit` of its characters, from its head and tail, and a line about the rest; None: all."""
    if limit is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} of {len(text)} characters not shown ...]\n{text[-half:]}"


def call_text(call: ToolCall) -> str:
    """A tool call as a line of code, such as `bash(cmd="ls")`; the model's own text where its JSON was not valid."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return _as_text(call)
    function: Mapping[str, Any] = call["function"]
    name, arguments = _as_text(function.get("name", "")), function.get("arguments", "")
    if not isinstance(arguments, dict):
        return f"{name}({_as_text(arguments)})"
    given = ", ".join(f"{key}={_as_json(value)}" for key, value in arguments.items())
    return f"{name}({given})"


def message_parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the parts of a message that hold text, as (label, text); one empty part where none does."""
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
    """Parts as text, an image as a word about it; any other list as JSON."""
    try:
        return text_of(content)
    except (TypeError, LookupError, AttributeError):  # In a message made by hand a list may hold anything.
        return _as_json(content)


def _as_text(value: object) -> str:
    """Text as it is, None as "", and any other value as JSON: in a message made by hand a field may hold anything."""
    return "" if value is None else value if isinstance(value, str) else _as_json(value)


def _as_json(value: object) -> str:
    """The value as JSON, or as Python writes it; its type where its own code raises."""
    for write in (partial(json.dumps, ensure_ascii=False), repr):
        try:
            return write(value)
        except Exception:  # A value of any kind may stand here: it is written in the next way.
            continue
    return f"<{type(value).__name__}>"


def role_of(message: Message) -> str:
    """The role, with the name of a tool behind it: `tool bash`."""
    role, name = _as_text(message.get("role")) or "(no role)", _as_text(message.get("name"))
    return f"{role} {name}" if name else role


def plain_text(segments: Sequence[SegmentTranscript], *, limit: int | None = SHOWN_CHARACTERS) -> str:
    """The segments as plain text, one `role: text` a message, continued lines indented.

    Messages that a segment took over from its parent are shown there, and counted here.
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
    """`text` with control characters and lone surrogates escaped: a model's output cannot steer the terminal."""
    return "".join(c if c in "\n\t" or _is_shown(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str) -> str:
    """`text` in one line, with new lines and all else that steers a terminal escaped: it can forge no line of a log."""
    return printable(text).replace("\n", "\\n")


def counted(number: int, what: str) -> str:
    """A count with its word: "1 turn", "2 turns"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size_text(turns: int, sampled: int, segments: int) -> str:
    """The size of a rollout, or of its branches, in words."""
    return ", ".join([counted(turns, "turn"), counted(sampled, "sampled token"), counted(segments, "segment")])


def heading(rollout_id: str, reward: float | None, stop_reason: str, size: str) -> str:
    """A rollout in one line."""
    worth = "failed" if reward is None else f"reward {reward:g}"
    return one_line(f"{rollout_id}: {worth}, stopped by {stop_reason}, {size}")


def outcome(
    rewards: Mapping[str, float],
    metrics: Mapping[str, float],
    failure: Failure | None,
    failed_cases: Mapping[str, str] | None = None,
    role_rewards: Mapping[str, float] | None = None,
) -> str:
    """The rewards by name and by role, the metrics, the failed hidden tests, and the failure with its traceback."""
    given = [("rewards", rewards), ("rewards of roles", role_rewards or {}), ("metrics", metrics)]
    lines = [f"{name}: " + ", ".join(f"{k} {v:g}" for k, v in numbers.items()) for name, numbers in given if numbers]
    cases = list((failed_cases or {}).items())
    lines += [f"failed case {shorten(name, SHOWN_NAME)!r}: {why}" for name, why in cases[:SHOWN_CASES]]
    if len(cases) > SHOWN_CASES:
        lines.append(f"and {len(cases) - SHOWN_CASES} more failed cases (all of them are in rollout.failed_cases)")
    if failure is not None:
        lines += [f"failed: {failure}", failure.traceback.rstrip()]
    return printable("\n".join(filter(None, lines)))


def _is_shown(character: str) -> bool:
    # Python calls every space but U+0020 unprintable, and surrogates of no kind can be encoded.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _label(message: Message, what: str) -> str:
    return one_line(f"{role_of(message)} {what}" if what else role_of(message))


def _with_entries(segments: Sequence[SegmentTranscript]) -> Iterator[tuple[SegmentTranscript, list[Message | str]]]:
    """Each segment with its messages, where those of its parent are replaced by a line that counts them."""
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
    except Exception:  # What a field of a message made by hand holds may refuse to be compared, as arrays do.
        return False


def show(
    head: str,
    segments: Sequence[SegmentTranscript],
    foot: str,
    *,
    limit: int | None = SHOWN_CHARACTERS,
    console: Any = None,
) -> None:
    """Print the segments with colors where the terminal has them; `console` is a rich Console, stdout by default."""
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
