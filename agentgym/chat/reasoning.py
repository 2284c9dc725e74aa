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
    inside: bool | None = None,
    marks: Sequence[tuple[str, str]] = (THINK,),
    calls: Sequence[tuple[str, str]] = (TAGGED_CALL,),
) -> tuple[str, str]:
    """Split a text into its reasoning and the rest, in time linear in its length.

    Reasoning goes from an opening mark to the next closing mark, or to the end of the text if no closing mark follows.
    A call in the reasoning is part of it. Marks after the beginning of the first call are part of a call's arguments.

    Args:
        text: The text of an assistant turn.
        inside: Whether the text begins inside the reasoning, because the turn's opening leaves a mark open. If None,
            it does if it has a closing mark without an opening one before it, unless the mark may be in a call: after
            a call's beginning, and before the end of a call.
        marks: The marks around reasoning: pairs of an opening and a closing mark.
        calls: The marks around a call: pairs of an opening and a closing mark. If the closing mark is "", a call goes
            on to the end of the text.

    Returns:
        The reasoning and the rest, both stripped, each with its pieces joined by line breaks. If the text has no
        reasoning, these are "" and the text unchanged.
    """
    if not inside and not _has_any(text, marks):
        return "", text
    closed, called = dict(marks), dict(calls)
    ends = frozenset(closed.values())
    thoughts: list[str] = []
    rest: list[str] = []
    start, thinking, calling = 0, bool(inside), False
    unopened = inside is None  # Whether a closing mark means that the text began inside its reasoning.
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
        elif mark in called:
            until, calling = frozenset([called[mark]]), True
        elif mark in closed and calling:
            unopened = False
        elif mark in closed:
            rest.append(text[start : found.start()])
            start, thinking, unopened, until = found.end(), True, False, frozenset([closed[mark]])
        elif mark in ends and unopened:
            unopened = False
            if not (calling and _is_before_end_of_call(text, found.end(), calls)):
                thoughts, rest, start, calling = [text[: found.start()]], [], found.end(), False
    (thoughts if thinking else rest).append(text[start:])
    if not thoughts:
        return "", text
    if inside:  # The model may repeat the mark that the opening ends with.
        thoughts[0] = _without(thoughts[0].lstrip(), closed)
    return _joined(thoughts), _joined(rest)


def _without(thought: str, marks: Iterable[str]) -> str:
    return next((thought.removeprefix(mark) for mark in marks if thought.startswith(mark)), thought)


def _is_before_end_of_call(text: str, at: int, calls: Sequence[tuple[str, str]]) -> bool:
    """Return whether a call ends at or after a place before another one begins."""
    for opening, closing in calls:
        end = text.find(closing, at) if closing else -1
        if end >= 0 and opening not in text[at:end]:
            return True
    return False


def begins_inside(opening: str, template: str, marks: Sequence[tuple[str, str]] = (THINK,)) -> bool | None:
    """Return whether an assistant turn begins inside its reasoning, for `split_reasoning`.

    It does if the turn's opening leaves a mark open. If the chat template never writes a closing mark, the model
    doesn't reason, and it doesn't. Otherwise it isn't known.

    Args:
        opening: The text with which the template opens an assistant turn.
        template: The chat template.
        marks: The marks around reasoning.
    """
    if any(opening.rfind(mark) > opening.rfind(end) for mark, end in marks):
        return True
    return None if any(end in template for _, end in marks) else False


def _has_any(text: str, marks: Sequence[tuple[str, str]]) -> bool:
    for opening, closing in marks:  # noqa: SIM110  It runs once a turn, and any() costs twice as much.
        if closing in text or opening in text:
            return True
    return False


@cache
def _scanner(marks: tuple[tuple[str, str], ...], calls: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    words = {word for pair in (*marks, *calls) for word in pair if word}
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


def _joined(pieces: Sequence[str]) -> str:
    return "\n".join(filter(None, (piece.strip() for piece in pieces)))
