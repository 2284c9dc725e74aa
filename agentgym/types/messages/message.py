"""Messages, and the parts of a content that isn't only text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Required, TypeAlias

from pydantic import BeforeValidator, PlainSerializer, WrapValidator
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from agentgym.types.messages.parts import content_of


class Function(TypedDict):
    """The called function: its name ("" if none could be parsed) and its arguments.

    `arguments` is a dict if the call was valid JSON, otherwise the raw text that the model wrote.
    """

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict, total=False):
    """One tool call of an assistant message, in the OpenAI format.

    `extra` has the other fields that an endpoint sent with the call, such as a thought signature. `ag.Endpoint` sends
    them back with it; under "function", it has those of the call's function.
    """

    id: str
    type: Literal["function"]
    function: Required[Function]
    extra: dict[str, Any]


class TextPart(TypedDict):
    """A text part of a content."""

    type: Literal["text"]
    text: str


class ImageURL(TypedDict, total=False):
    """An image as a data URL; `detail` sets the resolution at which some endpoints process it."""

    url: Required[str]
    detail: Literal["auto", "low", "high"]


class ImagePart(TypedDict):
    """An image part of a content, in the format of OpenAI's chat API; `ag.Image(...).part` returns one."""

    type: Literal["image_url"]
    image_url: ImageURL


Part: TypeAlias = TextPart | ImagePart
"""One part of a content that isn't only text."""


def _read(value: Any, read_text: Callable[[Any], str]) -> Any:
    return content_of(value, "content") if isinstance(value, list | tuple) else read_text(value)


if TYPE_CHECKING:
    Content: TypeAlias = Any
    """The type for type checkers: Any, so that code needs no cast to use a model's message, which is always text."""
else:
    Content = Annotated[str, WrapValidator(_read), PlainSerializer(lambda content: content, return_type=Any)]


ROLES = ("system", "user", "assistant", "tool")
"""The roles of messages."""


def role_of(given: Any) -> Any:
    """Return the role unchanged if it is valid.

    Raises:
        ValueError: If it isn't in `ROLES`; for "developer", the message suggests "system".
    """
    if given in ROLES:
        return given
    hint = "; use 'system', which chat templates support" if given == "developer" else ""
    raise ValueError(f"must be one of {', '.join(ROLES)}, got {given!r:.80}{hint}")


if TYPE_CHECKING:
    Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
else:
    Role = Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(role_of)]


class Message(TypedDict, total=False):
    """A chat message in the OpenAI format, which templates, tool parsers, MCP and proxies use.

    `content` is text. In a user or tool message it may also be a list of parts that includes an image; a model's
    message is always text. `extra` has the other fields that an endpoint sent with a model's message; `ag.Endpoint`
    sends them back with it.
    """

    role: Required[Role]
    content: Required[Content]
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
    extra: dict[str, Any]
