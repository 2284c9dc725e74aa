"""Chat messages in the OpenAI shape."""

from typing import Any, Literal, Required

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12


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


class Message(TypedDict, total=False):
    """A chat message in the OpenAI shape: what templates, tool parsers, MCP and proxies speak."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Required[str]
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
