"""Conversion of a task's id and prompt, as people write them and as data sets store them, into one form."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from agentgym.types.messages import Image, Message, with_objects


def as_id(value: Any) -> Any:
    """Return an integer as text, and anything else unchanged for the validation."""
    return str(int(value)) if isinstance(value, Integral) and not isinstance(value, bool) else value


def as_messages(value: Any) -> Any:
    """Return a prompt, which may be text (one user message), one message or several, as a tuple of messages.

    A list that contains an `ag.Image` is the content of one user message. Anything that can't be a prompt is returned
    unchanged for the validation.

    Arrow gives each row of a data set every key that any row has, with the value None; such keys are removed from
    messages. A call's arguments that are an object's JSON text, as in OpenAI's API, become the object.
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
    """Return a prompt as `as_messages` does.

    Raises:
        ValueError: If it has no messages.
    """
    messages = as_messages(value)
    if messages == ():
        raise ValueError("has no messages; the model needs at least one to answer")
    return messages


def _without_nones(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    # A role or content of None stays, so that the validation reports it: every message has these two keys.
    kept = {key: value for key, value in message.items() if value is not None or key in ("role", "content")}
    if isinstance(kept.get("tool_calls"), Iterable):
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return with_objects(kept)


def _call(call: Any) -> Any:
    """Return a tool call without the Nones that Arrow adds, except in its arguments, where None may be intended."""
    return {key: value for key, value in call.items() if value is not None} if isinstance(call, Mapping) else call


if TYPE_CHECKING:

    class TaskId:
        """The type for type checkers: a task is created with text or an integer, and its id is text."""

        def __get__(self, task: object, cls: type | None = None) -> str: ...
        def __set__(self, task: object, value: str | int) -> None: ...

    class TaskPrompt:
        """The type for type checkers: a task is created with text or messages, and its prompt is a tuple."""

        def __get__(self, task: object, cls: type | None = None) -> tuple[Message, ...]: ...
        def __set__(self, task: object, value: str | Message | Sequence[Message | str | Image]) -> None: ...

else:
    TaskId = Annotated[str, BeforeValidator(as_id)]
    TaskPrompt = Annotated[tuple[Message, ...], BeforeValidator(as_prompt)]


class Task(BaseModel):
    """One row of a data set: frozen, validated by field name; `id` is the group key of its rollouts.

    `prompt` accepts text or a list with images (one user message), one message, or a sequence of messages. However it
    was given, reading it returns a tuple of messages: the text of a task with one user message is
    `task.prompt[0]["content"]`. `id` also accepts an integer, and is text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: TaskId = Field(min_length=1)
    prompt: TaskPrompt


class StepResult(NamedTuple):
    """The result of `step`, with Gymnasium's names and order; `messages` never contains an assistant message."""

    messages: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
