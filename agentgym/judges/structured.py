"""Responses as pydantic models: instructions that request them, and their parsing."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from agentgym.environments.forks import AnswerT
from agentgym.types.json_values import MAX_DEPTH, MOST_DIGITS, is_sound
from agentgym.types.messages import Message, joined

_ASK = "Answer with one JSON object and nothing else. Its JSON schema is:\n{schema}"

_UNSOUND = f"numbers must be finite, text must have no lone surrogates, and nesting at most {MAX_DEPTH} levels"

_CUT = (
    "it was cut off at the maximum number of tokens, and then only an answer that is the JSON object alone counts; "
    "write the object, and nothing before it"
)


def asking_for(response: type[BaseModel], messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the response's schema at the end.

    The schema is appended to the last message if that is a user message. Otherwise it becomes a new user message.
    """
    return _added(messages, _ASK.format(schema=json.dumps(response.model_json_schema(), ensure_ascii=False)))


def told(messages: Sequence[Message], answer: str, said: str) -> list[Message]:
    """Return the messages with a model's answer, and with what it is told about it."""
    turn = [Message(role="assistant", content=answer)] if answer.strip() else []
    return _added([*messages, *turn], said)


def _added(messages: Sequence[Message], said: str) -> list[Message]:
    """Return the messages with a text of the user: as the end of the last message if that is a user message."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], Message(role="user", content=joined([messages[-1]["content"], said], "\n\n"))]
    return [*messages, Message(role="user", content=said)]


def read_answer(text: str, response: type[AnswerT], *, cut: bool = False) -> tuple[str, AnswerT]:
    """Return the last JSON object in the text that fits the schema, as text and as a model.

    The text may also contain anything else, because models think aloud and put fences around code. The time is linear
    in the length of the text.

    Args:
        text: The answer, without its reasoning.
        response: The pydantic model of the object.
        cut: Whether a limit cut the answer off. An object is then only a draft, unless it is the whole answer.

    Raises:
        ValueError: If no object fits. The message explains what is wrong with the last object.
    """
    wrong = "there is no JSON object in the answer"
    found: tuple[str, AnswerT] | None = None
    for written, value in _objects(text):
        if not is_sound(value):
            wrong = _UNSOUND
            continue
        try:
            found = written, response.model_validate(value)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'answer'}: {e['msg']}" for e in error.errors())
    if cut and (found is None or found[0] != text.strip()):
        raise ValueError(_CUT)
    if found is None:
        raise ValueError(wrong)
    return found


_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= MOST_DIGITS else math.inf)
_OPENING = re.compile(r'\{(?=[ \t\n\r]*+["}])')
_MARK = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}]', re.DOTALL)
"""Matches a string, or a brace outside of strings, in the beginning of valid JSON, which may end within a string."""


class _Uncounted(str):
    """A text whose lines aren't counted.

    For the message of each error, json counts the lines up to the error, which would take quadratic time for many
    errors in one text.
    """

    __slots__ = ()

    def count(self, *of: Any) -> int:
        return 0

    def rfind(self, *of: Any) -> int:
        return -1


def _objects(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the outermost JSON objects in a text, in order, each as its text and its value.

    The value of an object that is nested too deep to be read is NaN, which is no sound value.
    """
    uncounted, broken = _Uncounted(text), set[int]()
    """The places of braces whose objects contain an error that was already found."""
    end = 0
    for opening in _OPENING.finditer(text):
        at = opening.start()
        if at < end or at in broken:
            continue
        try:
            value, end = _DECODER.raw_decode(uncounted, at)
        except json.JSONDecodeError as error:
            broken.update(_open(text, at, error.pos)[0])
        except RecursionError:
            never_closed, after = _open(text, at, len(text))
            broken.update(never_closed)
            value, end = math.nan, end if never_closed else after
        if at < end:
            yield text[at:end], value


def _open(text: str, start: int, stop: int) -> tuple[list[int], int]:
    """Return the braces from `start` on that are still open at `stop`, and where the first one was closed.

    If it was not closed, this is `stop`.
    """
    opened = list[int]()
    for mark in _MARK.finditer(text, start, stop):
        if mark.group() == "{":
            opened.append(mark.start())
        elif mark.group() == "}":
            opened.pop()
            if not opened:
                return opened, mark.end()
    return opened, stop
