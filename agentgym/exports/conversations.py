"""Conversations of rollouts as JSON Lines, in the formats of SFT trainers and OpenAI's fine-tuning."""

from collections.abc import Sequence
from typing import Any

from agentgym.chat.fitting import is_malformed
from agentgym.engines.endpoint.requests import api_messages
from agentgym.types.json_values import writable
from agentgym.types.messages import Message, ToolCall, first_image
from agentgym.types.rollout import Segment
from agentgym.types.tool_names import SentNames

BRANCH = "branches, whose rewards are not those of their rollouts"
NOT_TRAINED = "conversations without a turn to train on"
CUT = "conversations with a turn that a limit cut off"
SEEN = "conversations with an image, which the format doesn't support"
MALFORMED = "conversations with a call that isn't valid JSON"


def why_not(segment: Segment, *, images: bool) -> str | None:
    """Return why a conversation shouldn't be imitated, or None if it should be.

    The reason is worded to follow a number: "conversations with an image ...".

    Args:
        segment: The conversation.
        images: Whether the format supports images; if not, a conversation with an image is refused.
    """
    if segment.branch is not None:
        return BRANCH
    if not segment.turns or not segment.trained:
        return NOT_TRAINED
    if any(turn.finish_reason == "length" for turn in segment.turns):
        return CUT
    if not images and first_image(_conversation(segment)[0]) is not None:
        return SEEN
    return MALFORMED if any(is_malformed(turn.message) for turn in segment.turns) else None


def sft_line(segment: Segment) -> dict[str, Any]:
    """Return a conversation up to its last turn, with its tools, as TRL and other trainers read it."""
    messages, _ = _conversation(segment)
    return writable({"messages": messages} | ({"tools": list(segment.tools)} if segment.tools else {}))  # type: ignore[no-any-return]


def openai_line(segment: Segment) -> dict[str, Any]:
    """Return a conversation up to its last turn in the chat format of OpenAI's fine-tuning.

    Assistant messages that aren't turns of this conversation get the weight 0. Reasoning is left out, because the
    format has no field for it. Tools get names that OpenAI's API accepts.
    """
    messages, is_turn = _conversation(segment)
    names = SentNames(segment.tools)
    sent = api_messages(_with_ids(messages), names=names)
    said = [message for message in sent if message["role"] == "assistant"]
    for message, own in zip(said, is_turn, strict=True):
        if not own:
            message["weight"] = 0
    return writable({"messages": sent} | ({"tools": names.tools(segment.tools)} if segment.tools else {}))  # type: ignore[no-any-return]


def _conversation(segment: Segment) -> tuple[list[Message], list[bool]]:
    """Return the messages up to the last turn, and for each assistant message whether it is a turn of this segment."""
    messages = [_without_extra(message) for message in segment.prompt_messages]
    is_turn = [False for message in messages if message["role"] == "assistant"]
    for turn in segment.turns:
        messages += [_without_extra(turn.message), *turn.env_messages]
        is_turn += [True, *(False for message in turn.env_messages if message["role"] == "assistant")]
    behind = len(segment.turns[-1].env_messages)
    end = len(messages) - behind
    return messages[:end], is_turn[: sum(message["role"] == "assistant" for message in messages[:end])]


def _without_extra(message: Message) -> Message:
    """Return a message without the fields that only the endpoint that sent it understands."""
    kept: Any = {name: value for name, value in message.items() if name != "extra"}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [{name: value for name, value in call.items() if name != "extra"} for call in calls]
    return kept  # type: ignore[no-any-return]


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an invented id for each tool call without one.

    A result without an id gets the id of the call that it belongs to.
    """
    made: list[Message] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool" and "tool_call_id" not in message and waiting:
            made.append(message | Message(role="tool", content=message["content"], tool_call_id=waiting.pop(0)))
            continue
        if message["role"] != "tool":
            waiting = []
        if calls := message.get("tool_calls"):
            named = [_with_id(call, f"call_{place}_{number}") for number, call in enumerate(calls)]
            waiting = [new["id"] for new, call in zip(named, calls, strict=True) if "id" not in call]
            message = message | Message(role="assistant", content=message["content"], tool_calls=named)
        made.append(message)
    return made


def _with_id(call: ToolCall, name: str) -> ToolCall:
    return call if "id" in call else ToolCall(id=name, **call)
