"""Transcripts: the conversations of a rollout as text, for terminals, failing tests and logs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.messages import Message, ToolCall

SHOWN_CHARACTERS = 2000
"""Of each message, where a reader did not ask for all of it."""
_STYLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}


@dataclass(frozen=True, slots=True)
class SegmentTranscript:
    """One segment as it was said: what it opened with, then each assistant message and what answered it."""

    index: int
    kind: str
    parent: int | None
    """Index of the segment that this one continues; None for the root."""
    messages: tuple[Message, ...]

    @property
    def title(self) -> str:
        """The segment in a few words, such as "segment 2: compaction of segment 0"."""
        return f"segment {self.index}: {self.kind}" + ("" if self.parent is None else f" of segment {self.parent}")


def shorten(text: str, limit: int | None) -> str:
    """At most `limit` characters, head and tail kept, and the cut is said; None keeps all."""
    if limit is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} of {len(text)} characters not shown ...]\n{text[-half:]}"


def call_text(call: ToolCall) -> str:
    """A tool call as a line of code: `bash(cmd="ls")`; what the model wrote, where it was no valid call."""
    function = call["function"]
    arguments: Any = function["arguments"]
    if not isinstance(arguments, dict):
        return f"{function['name']}({arguments})"
    given = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function['name']}({given})"


def message_parts(message: Message) -> Iterator[tuple[str, str]]:
    """The parts of a message that hold text, as (what it is, the text)."""
    if thought := message.get("reasoning_content"):
        yield "thinking", thought
    if content := message.get("content"):
        yield "", content
    for call in message.get("tool_calls") or ():
        yield "calls", call_text(call)


def role_of(message: Message) -> str:
    """The role, with a tool's name: `tool bash`."""
    name = message.get("name")
    return f"{message['role']} {name}" if name else message["role"]


def plain_text(segments: Sequence[SegmentTranscript], *, limit: int | None = SHOWN_CHARACTERS) -> str:
    """The segments as plain text, one `role: text` a message, continued lines indented."""
    lines: list[str] = []
    for segment in segments:
        if len(segments) > 1:
            lines.append(f"--- {segment.title}")
        for message in segment.messages:
            for what, text in message_parts(message) or [("", "")]:
                label = f"{role_of(message)}{f' {what}' if what else ''}: "
                lines.append(label + shorten(text, limit).replace("\n", "\n    "))
    return printable("\n".join(lines))


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates escaped: a model's output cannot steer the terminal."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() and not "\ud800" <= c <= "\udfff") else _escape(c) for c in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def show(
    head: str,
    segments: Sequence[SegmentTranscript],
    foot: str,
    *,
    limit: int | None = SHOWN_CHARACTERS,
    console: Any = None,
) -> None:
    """Print the segments with colours where the terminal has them; `console` is a rich Console, stdout by default."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    out = console or Console(highlight=False)
    out.print(Rule(Text(printable(head), style="bold"), align="left"))
    for segment in segments:
        if len(segments) > 1:
            out.print(Text(segment.title, style="bold blue"))
        for message in segment.messages:
            style = _STYLES.get(message["role"], "")
            for what, text in message_parts(message):
                label = Text(f"{role_of(message)}{f' {what}' if what else ''}", style=f"bold {style}")
                out.print(label)
                out.print(Text(printable(shorten(text, limit)), style="dim" if what == "thinking" else ""))
    out.print(Text(printable(foot), style="bold"))
