"""Messages, and the parts that a content is made of where it is not text alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Required, TypeAlias

from pydantic import BeforeValidator, PlainSerializer, WrapValidator
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from agentgym.types.messages.parts import content_of


class Function(TypedDict):
    """The called function: its name ("" when none could be read) and its arguments.

    `arguments` is a dict when the call was valid JSON, else the raw text the model wrote.
    """

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict, total=False):
    """One tool call of an assistant message, in the OpenAI shape."""

    id: str
    type: Literal["function"]
    function: Required[Function]


class TextPart(TypedDict):
    """A text among the parts of a content."""

    type: Literal["text"]
    text: str


class ImageURL(TypedDict, total=False):
    """An image as a data URL; `detail` says how closely some endpoints look at it."""

    url: Required[str]
    detail: Literal["auto", "low", "high"]


class ImagePart(TypedDict):
    """An image among the parts of a content, as OpenAI's chat API takes it; `ag.Image(...).part` is one."""

    type: Literal["image_url"]
    image_url: ImageURL


Part: TypeAlias = TextPart | ImagePart
"""One part of a content that is not text alone."""


def _read(value: Any, read_text: Callable[[Any], str]) -> Any:
    return content_of(value, "content") if isinstance(value, list | tuple) else read_text(value)


if TYPE_CHECKING:
    Content: TypeAlias = Any
    """What type checkers see, so that a model's own message, which is text, needs no cast."""
else:
    Content = Annotated[str, WrapValidator(_read), PlainSerializer(lambda content: content, return_type=Any)]


ROLES = ("system", "user", "assistant", "tool")
"""The roles of messages."""


def role_of(given: Any) -> Any:
    """Return a role as it was given; ValueError for none of `ROLES`, with the one that the newer word stands for."""
    if given in ROLES:
        return given
    hint = "; write 'system', which chat templates know" if given == "developer" else ""
    raise ValueError(f"must be one of {', '.join(ROLES)}, got {given!r:.80}{hint}")


if TYPE_CHECKING:
    Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
else:
    Role = Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(role_of)]


class Message(TypedDict, total=False):
    """A chat message in the OpenAI shape: what templates, tool parsers, MCP and proxies speak.

    `content` is text. In a message of the user or of a tool it may be a list of parts, one of them an image; a model's
    own message is text.
    """

    role: Required[Role]
    content: Required[Content]
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
