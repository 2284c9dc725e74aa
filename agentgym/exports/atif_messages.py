"""Conversion of messages to ATIF steps and results, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.exports.atif_images import without_details
from agentgym.types.messages import Function, Message, ToolCall, content_of, is_image

OURS = "agentgym"
"""The key under `extra` for data that ATIF has no field for."""
UNNAMED = "agentgym-call-"
"""Prefix of the ids that are invented for calls without an id, because ATIF requires one."""
_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}
_ROLES = {source: role for role, source in _SOURCES.items()}


def step_of(message: Message) -> dict[str, Any]:
    """Return a message other than a tool's as a step without a number; `message_of` restores the message."""
    step: dict[str, Any] = {"source": _SOURCES[message["role"]], "message": without_details(message["content"])}
    if step["source"] == "agent" and message.get("reasoning_content"):
        step["reasoning_content"] = message["reasoning_content"]
    if step["source"] == "agent" and message.get("tool_calls"):
        step["tool_calls"] = [_call(call, place) for place, call in enumerate(message["tool_calls"])]
    if message_of(step) != message:
        step["extra"] = {OURS: {"message": dict(message)}}
    return step


def message_of(step: Mapping[str, Any]) -> Message:
    """Return a step's message."""
    if (kept := ours(step).get("message")) is not None:
        return kept  # type: ignore[no-any-return]
    message = Message(role=_ROLES[step["source"]], content=content_from(step["message"]))  # type: ignore[typeddict-item]
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in step["tool_calls"]]
    return message


def result_of(message: Message, step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's message as a result within this step; `tool_message_of` restores the message."""
    result: dict[str, Any] = {"content": without_details(message["content"])}
    calls = [call["tool_call_id"] for call in step.get("tool_calls") or ()]
    if (answers := message.get("tool_call_id", next(iter(_unanswered(calls, step)), None))) in calls:
        result = {"source_call_id": answers, **result}
    if tool_message_of(result, step) != message:
        result["extra"] = {OURS: {"message": dict(message)}}
    return result


def tool_message_of(result: Mapping[str, Any], step: Mapping[str, Any]) -> Message:
    """Return the tool's message for a result within this step."""
    if (kept := ours(result).get("message")) is not None:
        return kept  # type: ignore[no-any-return]
    message = Message(role="tool", content=content_from(result.get("content")))
    answers = result.get("source_call_id")
    names = {call["tool_call_id"]: call["function_name"] for call in step.get("tool_calls") or ()}
    if answers in names:
        message["name"] = names[answers]
    if answers is not None and not answers.startswith(UNNAMED):
        message["tool_call_id"] = answers
    return message


def ours(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data that agentgym stored in the `extra` field of a document, step or result, or {}."""
    kept = (part.get("extra") or {}).get(OURS)
    return kept if isinstance(kept, Mapping) else {}


def content_from(content: str | list[Any] | None) -> Any:
    """Return the content as messages store it: text, or a list of parts if it includes an image.

    Raises:
        ValueError: If a part is neither text nor an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if any(is_image(part) for part in content):
        return content_of(content, "content")
    other = [part.get("type") for part in content if part.get("type") != "text"]
    if other:
        raise ValueError(f"a part has the type {other[0]!r}; only text and images are supported")
    return "".join(part["text"] for part in content)


def _call(call: ToolCall, place: int) -> dict[str, Any]:
    made = call["function"]["arguments"]
    return {
        "tool_call_id": call.get("id") or f"{UNNAMED}{place}",
        "function_name": call["function"]["name"],
        "arguments": made if isinstance(made, dict) else {"text": made},
    }


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = Function(name=call["function_name"], arguments=call["arguments"])
    made = ToolCall(type="function", function=function)
    return made if call["tool_call_id"].startswith(UNNAMED) else ToolCall(id=call["tool_call_id"], **made)


def _unanswered(calls: Sequence[str], step: Mapping[str, Any]) -> list[str]:
    """Return the invented ids (`UNNAMED`) of the step's calls that no result answers yet, in order."""
    results = (step.get("observation") or {"results": ()})["results"]
    answered = {result.get("source_call_id") for result in results}
    return [call for call in calls if call.startswith(UNNAMED) and call not in answered]
