"""Responses as pydantic models: instructions that request them, and their parsing."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from agentgym.environments.forks import AnswerT
from agentgym.types.json_values import MAX_DEPTH, is_sound
from agentgym.types.messages import Message, joined

_ASK = "Answer with one JSON object and nothing else. Its JSON schema is:\n{schema}"

_UNSOUND = f"numbers must be finite, text must have no lone surrogates, and nesting at most {MAX_DEPTH} levels"


def asking_for(response: type[BaseModel], messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the response's schema at the end.

    The schema is appended to the last message if that is a user message. Otherwise it becomes a new user message.
    """
    ask = _ASK.format(schema=json.dumps(response.model_json_schema(), ensure_ascii=False))
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], Message(role="user", content=joined([messages[-1]["content"], ask], "\n\n"))]
    return [*messages, Message(role="user", content=ask)]


def read_answer(text: str, response: type[AnswerT]) -> tuple[str, AnswerT]:
    """Return the last JSON object in the text that fits the schema, as text and as a model.

    The text may also contain anything else, because models think aloud and put fences around code.

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
    if found is None:
        raise ValueError(wrong)
    return found


def _objects(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the outermost JSON objects in a text, in order, each as its text and its value."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            yield text[at:end], value
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
