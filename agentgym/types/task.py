"""Conversion of a task's id and prompt, as people write them and as data sets hold them, into one form."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from agentgym.types.messages import Image, Message


def as_id(value: Any) -> Any:
    """Return a whole number as text; anything else is returned unchanged, for the validation to judge."""
    return str(int(value)) if isinstance(value, Integral) and not isinstance(value, bool) else value


def as_messages(value: Any) -> Any:
    """Return a text as one user message, one message as a prompt, and any other sequence as a tuple of messages.

    A list with an `ag.Image` in it is the content of one user message.

    Arrow gives each row of a data set every key that one of them has, as None: in a message such a key is left out.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if isinstance(value, Mapping):
        return (_without_nones(value),)
    if isinstance(value, list | tuple) and any(isinstance(part, Image) for part in value):
        return ({"role": "user", "content": value},)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return tuple(_without_nones(message) for message in value)
    return value


def as_prompt(value: Any) -> Any:
    """Return the messages of a prompt; ValueError where there is none."""
    messages = as_messages(value)
    if messages == ():
        raise ValueError("has no message: the model needs at least one to answer")
    return messages


def _without_nones(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    # A role or content of None is kept, so that the validation names it: every message has these two keys.
    kept = {key: value for key, value in message.items() if value is not None or key in ("role", "content")}
    if isinstance(kept.get("tool_calls"), Iterable):
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return kept


def _call(call: Any) -> Any:
    """Return a tool call without the Nones that Arrow fills in; its arguments are kept, for None may be meant there."""
    return {key: value for key, value in call.items() if value is not None} if isinstance(call, Mapping) else call


if TYPE_CHECKING:

    class TaskId:
        """What type checkers see: a task is made with text or a whole number, and its id is text."""

        def __get__(self, task: object, cls: type | None = None) -> str: ...
        def __set__(self, task: object, value: str | int) -> None: ...

    class TaskPrompt:
        """What type checkers see: a task is made with text or messages, and its prompt is a tuple of messages."""

        def __get__(self, task: object, cls: type | None = None) -> tuple[Message, ...]: ...
        def __set__(self, task: object, value: str | Message | Sequence[Message | str | Image]) -> None: ...

else:
    TaskId = Annotated[str, BeforeValidator(as_id)]
    TaskPrompt = Annotated[tuple[Message, ...], BeforeValidator(as_prompt)]


class Task(BaseModel):
    """One row of a data set: frozen, validated by field name; `id` is the group key of its rollouts.

    `prompt` also takes text or a list with images (one user message), or any messages; `id` also takes a whole number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: TaskId = Field(min_length=1)
    prompt: TaskPrompt


class StepResult(NamedTuple):
    """The result of `step`, with Gymnasium's names in their order; `messages` never holds an assistant message."""

    messages: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
