"""Assistant messages from parsed replies: those of an endpoint, and those that transformers' parser returns."""

from typing import Any

from agentgym.chat.formats.calls import call_of
from agentgym.types.messages import Message


def message_of(text: str, parsed: dict[str, Any]) -> Message:
    """Convert parsed fields to an assistant message, without ever raising.

    Args:
        text: The whole text of the reply. It becomes the content if a call is malformed.
        parsed: The fields `content`, `reasoning_content` and `tool_calls`, each of which may be missing.
    """
    calls = [call_of(call.get("function"), (), call_id=call.get("id")) for call in parsed.get("tool_calls") or ()]
    if any(isinstance(call["function"]["arguments"], str) for call in calls):
        return Message(role="assistant", content=text, tool_calls=calls)
    message = Message(role="assistant", content=parsed.get("content") or "")
    if parsed.get("reasoning_content"):
        message["reasoning_content"] = parsed["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    return message
