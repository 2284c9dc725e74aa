"""OpenAI's Chat Completions API: reads requests, and writes responses and events."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

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

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_READ = frozenset(
    (
        *("messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream"),
        *("stream_options", "n", "response_format", "logprobs", "user", "metadata", "store"),
    )
)
"""Request fields that cause no warning: they are followed, checked by `_refuse`, or have no effect on sampling."""
_ENDS = {"stop": "stop", "stop_text": "stop", "length": "length", "tool_calls": "tool_calls"}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 500: "server_error"}
_CODES = {"context": "context_length_exceeded"}
_PIECE = 64
"""Characters of text per event of a streamed response."""


def read(said: Mapping[str, Any]) -> AgentRequest:
    """Convert the body of POST /v1/chat/completions to an AgentRequest.

    Raises:
        RefusedError: If a field is missing or wrong, or has a value that isn't supported. The message names the field.
    """
    _refuse(said)
    given(said, "messages", list)
    listed = objects(said, "messages", most=MAX_MESSAGES)
    messages = [_message(message, f"messages[{i}].") for i, message in enumerate(listed)]
    check_conversation(messages)
    choice = said.get("tool_choice")
    offered = [] if choice == "none" else objects(said, "tools", most=MAX_TOOLS)
    options: Mapping[str, Any] = may(said, "stream_options", dict) or {}
    return AgentRequest(
        messages=with_tool_names(messages),
        tools=[_tool(tool, f"tools[{i}].") for i, tool in enumerate(offered)],
        model=model_name(said),
        max_tokens=whole(said, "max_completion_tokens") or whole(said, "max_tokens"),
        stop=texts(said.get("stop"), "stop"),
        stream=bool(may(said, "stream", bool)),
        shows_usage=bool(may(options, "include_usage", bool, "stream_options.")),
        not_followed=_not_followed(said),
    )


def _refuse(said: Mapping[str, Any]) -> None:
    """Raise RefusedError for options that the API doesn't support and can't ignore without changing the result."""
    if said.get("n") not in (None, 1):
        raise wrong("n", "must be 1; send another request for another answer", said["n"])
    if (may(said, "response_format", dict) or {"type": "text"}).get("type") != "text":
        raise wrong(
            "response_format.type", "must be text; constrained sampling is not supported", said["response_format"]
        )
    if said.get("functions"):
        raise wrong("functions", "must be given as `tools`", said["functions"])
    if said.get("logprobs"):
        raise wrong("logprobs", "must be false", said["logprobs"])


def _not_followed(said: Mapping[str, Any]) -> tuple[str, ...]:
    others = [name for name, value in said.items() if name not in _READ and value is not None]
    forced = ["tool_choice"] if said.get("tool_choice") not in (None, "auto", "none") else []
    return tuple(sorted(others + forced))


def _message(said: Mapping[str, Any], where: str) -> Message:
    role = _ROLES.get(given(said, "role", str, where))
    if role is None:
        raise wrong(f"{where}role", f"must be one of {', '.join(_ROLES)}", said["role"])
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    message = Message(role=role, content=parts_text(said.get("content"), f"{where}content", kinds))  # type: ignore[typeddict-item]
    if role == "assistant":
        calls = [_call(call, f"{where}tool_calls[{i}].") for i, call in enumerate(objects(said, "tool_calls", where))]
        if calls:
            message["tool_calls"] = calls
        if reasoning := may(said, "reasoning_content", str, where):
            message["reasoning_content"] = reasoning
    if role == "tool":
        message["tool_call_id"] = given(said, "tool_call_id", str, where)
    return message


def _call(said: Mapping[str, Any], where: str) -> ToolCall:
    function: Mapping[str, Any] = given(said, "function", dict, where)
    name: str = given(function, "name", str, f"{where}function.")
    call = ToolCall(type="function", function={"name": name, "arguments": arguments(function.get("arguments") or "{}")})
    if identity := may(said, "id", str, where):
        call["id"] = identity
    return call


def _tool(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    if said.get("type") != "function":
        raise wrong(f"{where}type", "must be function", said.get("type"))
    function: Mapping[str, Any] = given(said, "function", dict, where)
    given(function, "name", str, f"{where}function.")
    may(function, "parameters", dict, f"{where}function.")
    return {"type": "function", "function": dict(function)}


def written(request: AgentRequest, answer: AgentAnswer) -> dict[str, Any]:
    """Return the body of a response that isn't streamed."""
    message = dict(answer.message) | {"refusal": None}
    if calls := _calls(answer):
        message |= {"tool_calls": calls, "content": answer.message["content"] or None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _ENDS[answer.end]}
    return _head(request, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def events(request: AgentRequest, answer: AgentAnswer) -> list[bytes]:
    """Return a streamed response: its server-sent events, with the text split over several of them."""
    head = _head(request, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], end: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        return _event({**head, "choices": [choice], **({"usage": None} if request.shows_usage else {})})

    made = [chunk({"role": "assistant", "content": ""})]
    made += [chunk({"reasoning_content": text}) for text in pieces(answer.message.get("reasoning_content", ""))]
    made += [chunk({"content": text}) for text in pieces(answer.message["content"])]
    for index, call in enumerate(_calls(answer)):
        function = call["function"]
        opened = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        made.append(chunk({"tool_calls": [opened]}))
        made += [
            chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            for text in pieces(function["arguments"])
        ]
    made.append(chunk({}, _ENDS[answer.end]))
    if request.shows_usage:
        made.append(_event({**head, "choices": [], "usage": _usage(answer)}))
    return [*made, b"data: [DONE]\n\n"]


def pieces(text: str) -> Iterator[str]:
    """Split a text into the pieces that the events of a streamed response contain."""
    for at in range(0, len(text), _PIECE):
        yield text[at : at + _PIECE]


def error(refused: RefusedError) -> dict[str, Any]:
    """Return the body of the response to a refused request."""
    kind = _KINDS.get(refused.status, "invalid_request_error")
    code = _CODES.get(refused.kind, None if refused.kind == "invalid" else refused.kind)
    return {"error": {"message": refused.message, "type": kind, "param": refused.field, "code": code}}


def _head(request: AgentRequest, kind: str) -> dict[str, Any]:
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": request.model}


def _calls(answer: AgentAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in answer.message.get("tool_calls", ())
    ]


def _usage(answer: AgentAnswer) -> dict[str, int]:
    prompt, sampled = answer.prompt_tokens, answer.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(said: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(said, ensure_ascii=False).encode() + b"\n\n"
