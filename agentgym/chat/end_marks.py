"""The special tokens with which a chat template ends an assistant's turn."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from agentgym.chat.template_probes import ASK, MORE, SAID, UNUSUAL, ArgumentForm, result, turn_with_calls
from agentgym.types.messages import Message

Render: TypeAlias = Callable[[Sequence[Message]], str]
"""A function that renders messages, without the opening of an assistant turn at the end."""


def missing_stop_marks(
    render: Render, arguments: ArgumentForm | None, special_tokens: Mapping[str, bool], stops: Collection[str]
) -> list[str]:
    """Return the special tokens with which the template ends a turn, for turns that no stop token would end.

    Args:
        render: Renders a conversation with the chat template.
        arguments: The form of arguments in which the template shows calls; None if it shows none.
        special_tokens: The added tokens, and whether each is marked as special. Only these end a turn with a call,
            because the marks around a call are often added tokens, too.
        stops: The texts of the tokens that stop sampling.
    """
    missing: list[str] = []
    after_call = {mark: special for mark, special in special_tokens.items() if special}
    for ending in (_after_text(render, _any(special_tokens)), _after_call(render, arguments, _any(after_call))):
        if ending and {*stops, *missing}.isdisjoint(ending):
            missing.append(ending[0])
    return missing


def _any(marks: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _after_text(render: Render, marks: re.Pattern[str]) -> list[str]:
    """Return the special tokens that end a turn without calls, if the first one follows its text.

    They are those that follow both the last turn and one before another message. If the template writes other tokens
    after the last turn than between turns, those count, because the model samples the last turn.
    """
    last, between = (_marks_after(_rendered(render, [ASK, SAID, *more]), marks) for more in ([], [MORE]))
    both = [mark for mark, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, between, strict=False))]
    return both or last or between


def _marks_after(told: str, marks: re.Pattern[str]) -> list[str]:
    """Return the marks between an assistant's text and the next message, if the first one follows the text."""
    rest = told.partition(UNUSUAL)[2].partition(MORE["content"])[0].lstrip()
    return marks.findall(rest) if marks.match(rest) else []


def _after_call(render: Render, arguments: ArgumentForm | None, marks: re.Pattern[str]) -> list[str]:
    """Return the special tokens that end a turn with a call: the last one of the turn, then those before the result."""
    if arguments is None:
        return []
    turn, answer = turn_with_calls(arguments, "", 1), result(0)
    told, answered = _rendered(render, [ASK, turn]).rstrip(), _rendered(render, [ASK, turn, answer])
    if not told or answer["content"] not in answered:
        return []
    last = [mark for mark in marks.findall(told)[-1:] if told.endswith(mark)]
    before_result = answered.removeprefix(told).partition(answer["content"])[0] if answered.startswith(told) else ""
    return [*last, *marks.findall(before_result)]


def _rendered(render: Render, messages: Sequence[Message]) -> str:
    try:
        return render(messages)
    except Exception:  # Templates can raise anything.
        return ""


def name_stop_ids(model: Path, stop_ids: Collection[int]) -> None:
    """Add ids to those that end a turn in a model folder's generation config, for servers that read only this file."""
    from transformers import GenerationConfig

    file = model / "generation_config.json"
    config = GenerationConfig.from_pretrained(model) if file.is_file() else GenerationConfig()
    named = config.eos_token_id
    known = {named} if isinstance(named, int) else set(named or ())
    if not known.issuperset(stop_ids):
        config.eos_token_id = sorted(known | set(stop_ids))
        config.save_pretrained(model)
