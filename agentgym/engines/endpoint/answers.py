"""Parses and validates an endpoint's responses."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from agentgym.chat.message_chat import estimated_tokens
from agentgym.chat.parsing import message_of, parse_hermes
from agentgym.engines.messages import MessageCompletion, Usage
from agentgym.errors import EngineError
from agentgym.types.completion import FinishReason
from agentgym.types.json_values import whole_characters
from agentgym.types.messages import Message

SHOWN = 200
"""Number of characters of a response that an error message quotes."""
_LENGTH = frozenset({"length", "max_tokens", "model_length"})
"""Values of finish_reason for a reply that a limit on tokens cut off."""
_REFUSED = frozenset({"content_filter", "error", "abort", "safety"})
"""Values of finish_reason for a reply that the endpoint filtered or aborted."""


class GarbageError(Exception):
    """Raised if the endpoint's response isn't a chat completion."""


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


MOST_TOKENS = 1 << 24
"""Largest valid token count in a response. No request has as many tokens, so a larger count is invalid."""
_Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class _PromptDetails(BaseModel):
    cached_tokens: _Tokens | None = None


class _CompletionDetails(BaseModel):
    reasoning_tokens: _Tokens | None = None


class _Usage(BaseModel):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class Answer(BaseModel):
    """A chat completion, with only the fields that are used here."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None
    """Token counts; None if they are missing or invalid."""

    @field_validator("usage", mode="wrap")
    @classmethod
    def _uncounted(cls, read: Any, check: ValidatorFunctionWrapHandler) -> _Usage | None:
        try:
            usage: _Usage | None = check(read)
        except ValidationError:
            return None
        return usage


def read_answer(body: bytes) -> Answer:
    """Parse a chat completion.

    Raises:
        GarbageError: If the body is anything else. The message quotes its beginning.
    """
    try:
        return Answer.model_validate(json.loads(body))
    except (ValidationError, ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else type(error).__name__
        place = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else "JSON"
        shown = body[:SHOWN].decode(errors="replace")
        raise GarbageError(f"the response is not a chat completion ({place}: {why}): {shown!r}") from None


def completion_of(answer: Answer, *, in_prompt: bool) -> MessageCompletion:
    """Convert the first choice of a response to a MessageCompletion. The caller must set its cost, which is 0.

    Args:
        answer: The response.
        in_prompt: Whether the tools were described in the prompt, so that tool calls must be parsed from the text.

    Raises:
        EngineError: If the endpoint filtered or aborted the reply.
    """
    choice = answer.choices[0]
    if choice.finish_reason in _REFUSED:
        raise EngineError(f"the endpoint stopped the reply with finish_reason {choice.finish_reason!r}")
    message = _message_of(choice.message, in_prompt=in_prompt)
    reason: FinishReason = "length" if choice.finish_reason in _LENGTH else "stop"
    return MessageCompletion(message=message, finish_reason=reason, usage=_usage_of(answer.usage, message))


def _message_of(read: _Message, *, in_prompt: bool) -> Message:
    content = read.content or read.refusal or ""
    calls = read.tool_calls or ()
    if in_prompt and not calls:
        message = parse_hermes(content)
    else:
        made = [
            {
                "id": call.id and whole_characters(call.id),
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in calls
        ]
        message = message_of(content, {"content": content, "tool_calls": made})
    if thought := read.reasoning_content or read.reasoning:
        message["reasoning_content"] = thought
    return message


def _arguments(written: str | dict[str, Any] | None) -> Any:
    """Return a call's arguments, parsed if they are valid JSON, else as the text that the model wrote."""
    if not isinstance(written, str):
        return written or {}
    if not written.strip():
        return {}
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


def _usage_of(read: _Usage | None, message: Message) -> Usage:
    if read is None:
        return Usage(completion_tokens=estimated_tokens(message), requests=1, uncounted_requests=1)
    prompt, completion = read.prompt_tokens_details, read.completion_tokens_details
    return Usage(
        prompt_tokens=read.prompt_tokens,
        cached_tokens=min(read.prompt_tokens, (prompt.cached_tokens or 0) if prompt else 0),
        completion_tokens=read.completion_tokens,
        reasoning_tokens=min(read.completion_tokens, (completion.reasoning_tokens or 0) if completion else 0),
        requests=1,
    )
