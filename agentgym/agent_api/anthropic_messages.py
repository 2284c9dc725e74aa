"""Anthropic's Messages API: reads requests, and writes responses and events."""

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from agentgym.agent_api.chat_completions import pieces
from agentgym.agent_api.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    arguments,
    check_conversation,
    given,
    may,
    model_name,
    objects,
    parts_text,
    texts,
    whole,
    with_tool_names,
    wrong,
)
from agentgym.agent_api.requests import AgentAnswer, AgentRequest, RefusedError
from agentgym.types.messages import Message, ToolCall

_READ = frozenset(
    ("messages", "model", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "metadata")
)
"""Request fields that cause no warning: they are either followed, or have no effect on sampling."""
_ENDS = {"stop": "end_turn", "stop_text": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
_OWN = ("thinking", "redacted_thinking")
"""Types of blocks in which an agent sends the policy's reasoning back.

They are skipped, because the stored ids of the policy's turns already contain the reasoning.
"""


def read(said: Mapping[str, Any], *, counts: bool = False) -> AgentRequest:
    """Convert the body of POST /v1/messages to an AgentRequest.

    If `counts`, the body is that of /v1/messages/count_tokens, which samples nothing and needs no `max_tokens`.

    Raises:
        RefusedError: If a field is missing or wrong. The message names the field.
    """
    given(said, "messages", list)
    system = parts_text(said.get("system"), "system")
    messages = [Message(role="system", content=system)] if system else []
    for i, message in enumerate(objects(said, "messages", most=MAX_MESSAGES)):
        messages += _messages(message, f"messages[{i}].")
    check_conversation(messages)
    choice: Mapping[str, Any] = may(said, "tool_choice", dict) or {}
    offered = [] if choice.get("type") == "none" else objects(said, "tools", most=MAX_TOOLS)
    if not counts:
        given(said, "max_tokens", int)
    return AgentRequest(
        messages=with_tool_names(messages),
        tools=[_tool(tool, f"tools[{i}].") for i, tool in enumerate(offered)],
        model=model_name(said),
        max_tokens=whole(said, "max_tokens"),
        stop=texts(said.get("stop_sequences"), "stop_sequences"),
        stream=bool(may(said, "stream", bool)),
        not_followed=_not_followed(said, choice),
    )


def _not_followed(said: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[str, ...]:
    others = [name for name, value in said.items() if name not in _READ and value is not None]
    return tuple(sorted(others + (["tool_choice"] if choice.get("type") in ("any", "tool") else [])))


def _messages(said: Mapping[str, Any], where: str) -> list[Message]:
    """Convert an Anthropic message to one message for each tool result in it, followed by one with its text."""
    role = given(said, "role", str, where)
    if role not in ("user", "assistant"):
        raise wrong(f"{where}role", "must be user or assistant", role)
    content = said.get("content")
    if isinstance(content, str):
        return [Message(role=role, content=content)]
    given(said, "content", list, where)
    blocks = objects(said, "content", where)
    return [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    told: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        at = f"{where}content[{i}]."
        if block.get("type") == "tool_use":
            function = {"name": given(block, "name", str, at), "arguments": arguments(given(block, "input", dict, at))}
            calls.append(ToolCall(type="function", id=given(block, "id", str, at), function=function))  # type: ignore[typeddict-item]
        elif block.get("type") not in _OWN:
            told.append(block)
    message = Message(role="assistant", content=parts_text(told, f"{where}content"))
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    told = [block for block in blocks if block.get("type") != "tool_result"]
    made: list[Message] = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            at = f"{where}content[{i}]."
            content = parts_text(block.get("content"), f"{at}content")
            made.append(Message(role="tool", content=content, tool_call_id=given(block, "tool_use_id", str, at)))
    if told or not made:
        made.append(Message(role="user", content=parts_text(told, f"{where}content")))
    return made


def _tool(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    if said.get("type") not in (None, "custom"):
        raise wrong(f"{where}type", "must be custom; no tool runs on the server", said["type"])
    function = {"name": given(said, "name", str, where), "parameters": given(said, "input_schema", dict, where)}
    if description := may(said, "description", str, where):
        function["description"] = description
    return {"type": "function", "function": function}


def written(request: AgentRequest, answer: AgentAnswer) -> dict[str, Any]:
    """Return the body of a response that isn't streamed."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
    return _head(request, list(_blocks(answer)), usage) | _end(answer)


def events(request: AgentRequest, answer: AgentAnswer) -> list[bytes]:
    """Return a streamed response: its server-sent events, with the text split over several of them."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 1}
    made = [_event("message_start", message=_head(request, [], usage))]
    for index, block in enumerate(_blocks(answer)):
        is_text = block["type"] == "text"
        opened = {**block, "text": ""} if is_text else {**block, "input": {}}
        made.append(_event("content_block_start", index=index, content_block=opened))
        kind, name = ("text_delta", "text") if is_text else ("input_json_delta", "partial_json")
        whole_text = block["text"] if is_text else json.dumps(block["input"], ensure_ascii=False)
        made += [
            _event("content_block_delta", index=index, delta={"type": kind, name: text}) for text in pieces(whole_text)
        ]
        made.append(_event("content_block_stop", index=index))
    made.append(_event("message_delta", delta=_end(answer), usage={"output_tokens": answer.sampled_tokens}))
    return [*made, _event("message_stop")]


def error(refused: RefusedError) -> dict[str, Any]:
    """Return the body of the response to a refused request."""
    kind = _KINDS.get(refused.status, "api_error")
    message = f"prompt is too long: {refused.message}" if refused.kind == "context" else refused.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def _head(request: AgentRequest, content: list[dict[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
    fixed = {"type": "message", "role": "assistant", "stop_reason": None, "stop_sequence": None}
    named = {"id": f"msg_{uuid.uuid4().hex[:24]}", "model": request.model}
    return {**named, **fixed, "content": content, "usage": dict(usage)}


def _end(answer: AgentAnswer) -> dict[str, Any]:
    return {"stop_reason": _ENDS[answer.end], "stop_sequence": answer.stop_text}


def _blocks(answer: AgentAnswer) -> Iterator[dict[str, Any]]:
    calls = answer.message.get("tool_calls", ())
    if answer.message["content"] or not calls:
        yield {"type": "text", "text": answer.message["content"]}
    for call in calls:
        function = call["function"]
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}


def _event(kind: str, **said: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **said}, ensure_ascii=False)}\n\n".encode()
