"""Converts messages, tools and sampling parameters to the format of an endpoint's requests."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from agentgym.chat.tools_in_prompt import calls_as_text, results_as_text, with_tools
from agentgym.types.completion import Sampling
from agentgym.types.json_values import whole_characters, writable
from agentgym.types.messages import Message, ToolCall, is_image, joined, parts_of
from agentgym.types.tool_names import SentNames


def api_messages(
    messages: Sequence[Message],
    *,
    names: SentNames,
    reasoning: str | None = None,
    leave_out: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Convert messages to the format of an API with tools, which requires exactly one result after each call.

    A tool message that doesn't belong to a call of the preceding turn becomes a user message. A call without a result,
    such as one in a turn that a fork continues from, gets the result "[no result]".

    The API accepts images only from the user. The images of a turn's results are therefore sent in a user message after
    the results. Each result contains the names of its images.

    A call that the endpoint could not read, and therefore did not send, is not sent back as a call either.

    Args:
        messages: The conversation.
        names: The names under which the API gets the tools.
        reasoning: The field for the reasoning of earlier turns, which each of them then has, even if it is empty;
            "content" for the parts of the content as the endpoint sent them. None leaves the reasoning out.
        leave_out: Fields that the endpoint sent with a message or a call, but that are not sent back.
    """
    made: list[dict[str, Any]] = []
    open_calls: list[str] = []
    seen: list[Any] = []
    """The images from the tool results directly before `message`. Before each image is a text part with its name."""
    for message in messages:
        role, answers = message["role"], message.get("tool_call_id")
        if role == "tool" and answers in open_calls:
            open_calls.remove(answers)
            told = _without_images(message["content"], seen)
            made.append({"role": role, "content": _whole(told), "tool_call_id": answers})
            continue
        made += _without_result(open_calls)
        open_calls = []
        sent: dict[str, Any] = {"role": "user" if role == "tool" else role, "content": _whole(message["content"])}
        if seen and sent["role"] == "user":
            sent["content"] = joined([seen, sent["content"]], "\n")
        elif seen:
            made.append({"role": "user", "content": seen})
        seen = []
        if role == "assistant":
            sent |= _turn_fields(message, names, reasoning, leave_out)
            open_calls = [call["id"] for call in sent.get("tool_calls", ())]
        made.append(sent)
    made += _without_result(open_calls)
    return [*made, {"role": "user", "content": seen}] if seen else made


def _without_images(content: Any, seen: list[Any]) -> str:
    """Return the text of a tool result, with a name in place of each image.

    The names and the images are appended to `seen`.
    """
    told: list[str] = []
    for part in parts_of(content):
        if not is_image(part):
            told.append(part["text"])
            continue
        name = f"image {sum(map(is_image, seen)) + 1}"
        told.append(f"[{name}, in the next message]")
        seen += [{"type": "text", "text": f"{name} of the tools' results:"}, part]
    return "\n".join(told)


def _without_result(calls: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": "[no result]", "tool_call_id": call} for call in calls]


def _turn_fields(
    message: Message, names: SentNames, reasoning: str | None, leave_out: Collection[str]
) -> dict[str, Any]:
    """Return the fields of an assistant message beside its role and content, and a content that is sent otherwise."""
    fields = _kept_fields(message, reasoning, leave_out)
    calls = message.get("tool_calls", ())
    if sent := [_api_call(call, names, leave_out) for call in calls if not _is_unread(call)]:
        fields["tool_calls"] = sent
    elif calls and not message["content"]:
        fields["content"] = "[a call that could not be read]"
    return fields


def _kept_fields(message: Message, reasoning: str | None, leave_out: Collection[str]) -> dict[str, Any]:
    """Return what came with an assistant message and goes back: its reasoning, and the endpoint's own fields."""
    fields = _sent_back(message, leave_out)
    parts = fields.pop("content", None)
    if reasoning == "content":
        fields |= {"content": parts} if parts else {}
    elif reasoning:
        fields[reasoning] = whole_characters(message.get("reasoning_content", ""))
    return fields


def _sent_back(given: Message | ToolCall, leave_out: Collection[str]) -> dict[str, Any]:
    return {name: writable(value) for name, value in given.get("extra", {}).items() if name not in leave_out}


def _is_unread(call: ToolCall) -> bool:
    return not call["function"]["name"] and isinstance(call["function"]["arguments"], str)


def _api_call(call: ToolCall, names: SentNames, leave_out: Collection[str]) -> dict[str, Any]:
    made = call["function"]["arguments"]
    # Some servers reject arguments that aren't JSON, so the model's text is sent as an argument.
    arguments = json.dumps(made if isinstance(made, dict) else {"raw": made}, ensure_ascii=False)
    extra = _sent_back(call, leave_out)
    function = {
        "name": names.sent(call["function"]["name"] or "unknown"),
        "arguments": _whole(arguments),
        **extra.pop("function", {}),
    }
    return {"id": call.get("id", ""), "type": "function", "function": function, **extra}


def prompt_messages(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    *,
    reasoning: str | None = None,
    leave_out: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Convert messages to the format of an API without tools.

    The tools are listed in the system message. Calls and results are written as text in the Hermes format.

    Args:
        messages: The conversation.
        tools: The schemas of the tools.
        reasoning: The field for the reasoning of earlier turns, as for `api_messages`.
        leave_out: Fields that the endpoint sent with a message, but that are not sent back.
    """
    made: list[dict[str, Any]] = []
    for message in with_tools(results_as_text([calls_as_text(message) for message in messages]), tools):
        kept = _kept_fields(message, reasoning, leave_out) if message["role"] == "assistant" else {}
        made.append({"role": message["role"], "content": _whole(message["content"]), **kept})
    return made


def sampling_fields(sampling: Sampling, *, max_tokens: int, seed: int) -> dict[str, Any]:
    """Return a request's sampling fields. `top_k` and `min_p` are extensions of vLLM and SGLang."""
    made: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": max_tokens, "seed": seed % (1 << 31)}
    if sampling.top_p < 1:
        made["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        made["top_k"] = sampling.top_k
    if sampling.min_p:
        made["min_p"] = sampling.min_p
    if sampling.stop:
        made["stop"] = list(sampling.stop)
    return made


def _whole(content: Any) -> Any:
    """Return the content with the lone surrogates in its texts replaced, because UTF-8 can't encode them."""
    if isinstance(content, str):
        return whole_characters(content)
    return [part if is_image(part) else {"type": "text", "text": whole_characters(part["text"])} for part in content]
