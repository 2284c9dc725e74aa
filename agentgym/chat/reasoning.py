"""Splits a model's text into its reasoning and the rest. Tokenizers, endpoints and judges all use this function."""

import re
from collections.abc import Iterable, Sequence
from functools import cache

THINK = ("<think>", "</think>")
"""The marks around the reasoning of most models."""
TAGGED_CALL = ("<tool_call>", "</tool_call>")
"""The marks around a call in the Hermes format, and in Qwen's and GLM's formats."""


def split_reasoning(
    text: str,
    *,
    inside: bool = False,
    marks: Sequence[tuple[str, str]] = (THINK,),
    calls: Sequence[tuple[str, str]] = (TAGGED_CALL,),
) -> tuple[str, str]:
    """Split a text into its reasoning and the rest, in time linear in its length.

    Reasoning goes from an opening mark to the next closing mark, or to the end of the text if no closing mark follows.
    A text that has a closing mark without an opening one before it began inside its reasoning. Marks inside a call are
    part of the call's arguments, and calls inside the reasoning are part of the reasoning.

    Args:
        text: The text of an assistant turn.
        inside: Whether the text begins inside the reasoning, because the turn's opening leaves a mark open.
        marks: The marks around reasoning: pairs of an opening and a closing mark.
        calls: The marks around a call: pairs of an opening and a closing mark. If the closing mark is "", a call goes
            on to the end of the text.

    Returns:
        The reasoning and the rest, both stripped, each with its pieces joined by line breaks. If the text has no
        reasoning, these are "" and the text unchanged.
    """
    if not inside and not any(mark in text for pair in marks for mark in pair):
        return "", text
    closed, called = dict(marks), dict(calls)
    ends = frozenset(closed.values())
    thoughts: list[str] = []
    rest: list[str] = []
    start, thinking = 0, inside
    until = ends if inside else frozenset[str]()  # The marks that end the reasoning or the call at this place.
    for found in _scanner(tuple(marks), tuple(calls)).finditer(text):
        mark = found.group()
        if mark in until:
            if thinking:
                thoughts.append(text[start : found.start()])
                start, thinking = found.end(), False
            until = frozenset()
        elif until:
            continue
        elif mark in closed:
            rest.append(text[start : found.start()])
            start, thinking, until = found.end(), True, frozenset([closed[mark]])
        elif mark in called:
            until = frozenset([called[mark]])
        elif mark in ends and not thoughts:
            thoughts, rest, start = [text[: found.start()]], [], found.end()
    (thoughts if thinking else rest).append(text[start:])
    if not thoughts:
        return "", text
    if inside:  # The model may repeat the mark that the opening ends with.
        thoughts[0] = _without(thoughts[0].lstrip(), closed)
    return _joined(thoughts), _joined(rest)


def _without(thought: str, marks: Iterable[str]) -> str:
    return next((thought.removeprefix(mark) for mark in marks if thought.startswith(mark)), thought)


def opens_reasoning(opening: str, marks: tuple[str, str] = THINK) -> bool:
    """Return whether an assistant turn starts inside its reasoning, because its opening leaves a mark open."""
    return opening.rfind(marks[0]) > opening.rfind(marks[1])


@cache
def _scanner(marks: tuple[tuple[str, str], ...], calls: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    words = {word for pair in (*marks, *calls) for word in pair if word}
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


def _joined(pieces: Sequence[str]) -> str:
    return "\n".join(filter(None, (piece.strip() for piece in pieces)))
