"""Parses and validates an endpoint's responses."""

import json
import logging
import re
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from agentgym.chat.formats import HERMES
from agentgym.chat.formats.calls import json_at, raw_call, skip_blanks
from agentgym.chat.formats.response_format import Tools, looks_like_call
from agentgym.chat.message_chat import estimated_tokens
from agentgym.chat.parsing import message_of
from agentgym.chat.reasoning import split_reasoning
from agentgym.engines.endpoint.content_parts import Parts, parts_read
from agentgym.engines.messages import MessageCompletion, Usage
from agentgym.errors import EngineError
from agentgym.types.completion import FinishReason
from agentgym.types.json_values import MAX_DEPTH, is_sound, whole_characters, writable
from agentgym.types.messages import Message
from agentgym.types.tool_names import SentNames

log = logging.getLogger(__name__)

SHOWN = 200
"""Number of characters of a response that an error message quotes."""
_LENGTH = frozenset({"length", "max_tokens", "model_length"})
"""Values of finish_reason for a reply that a limit on tokens cut off."""
_REFUSED = frozenset({"content_filter", "error", "abort", "safety"})
"""Values of finish_reason for a reply that the endpoint filtered or aborted."""
_NO_CALL = re.compile("(malformed|unexpected)_(function|tool)_call")
"""Matches values of finish_reason, in lower case, for a reply that is a call which the endpoint could not read."""


class GarbageError(Exception):
    """Raised if the endpoint's response isn't a chat completion."""


class _Kept(BaseModel):
    """An object whose unknown fields are kept, to be sent back with it."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _shallow(self) -> Self:
        if not is_sound(writable(self.model_extra)):
            raise ValueError(f"a field has more than {MAX_DEPTH} levels of nesting")
        return self

    @property
    def extra(self) -> dict[str, Any]:
        """The unknown fields that aren't empty. Many endpoints send `null` or `[]` for features that weren't used."""
        return {name: value for name, value in (self.model_extra or {}).items() if value not in (None, "", [], {})}


class _Function(_Kept):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(_Kept):
    id: str | None = None
    type: Any = None
    index: Any = None
    """The call's place, which its place in the list already says."""
    function: _Function


class _Message(_Kept):
    role: Any = None
    content: str | list[Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None

    @property
    def end(self) -> str:
        """The finish_reason in lower case, without the detail that some endpoints write after a colon."""
        return (self.finish_reason or "").lower().partition(":")[0].strip()


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
        GarbageError: If the body is anything else, or a reply without any text, call or token. The message quotes its
            beginning.
    """
    shown = body[:SHOWN].decode(errors="replace")
    try:
        answer = Answer.model_validate(json.loads(body))
    except (ValidationError, ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else type(error).__name__
        place = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else "JSON"
        raise GarbageError(f"the response is not a chat completion ({place}: {why}): {shown!r}") from None
    if _is_empty(answer):
        raise GarbageError(f"the response is empty: it has no text, no call and no tokens: {shown!r}")
    return answer


def _is_empty(answer: Answer) -> bool:
    """Return whether the reply has nothing and took no token, although no limit, filter or malformed call ended it."""
    choice, usage = answer.choices[0], answer.usage
    if usage is None or usage.completion_tokens or choice.end in _LENGTH | _REFUSED or _is_no_call(choice):
        return False
    read = choice.message
    return not any((read.content, read.refusal, read.reasoning_content, read.reasoning, read.tool_calls))


def _is_no_call(choice: _Choice) -> bool:
    return bool(_NO_CALL.search((choice.finish_reason or "").lower()))


def reasoning_field(answer: Answer) -> str | None:
    """Return the field of the message that has the reasoning, or None if it has none.

    It is "content" if the reasoning is among the parts of the content.
    """
    read = answer.choices[0].message
    if read.reasoning_content:
        return "reasoning_content"
    if read.reasoning:
        return "reasoning"
    return "content" if parts_read(read.content).reasoning else None


def completion_of(answer: Answer, tools: Tools, *, in_prompt: bool, names: SentNames) -> MessageCompletion:
    """Convert the first choice of a response to a MessageCompletion. The caller must set its cost, which is 0.

    Args:
        answer: The response.
        tools: The schemas of the tools.
        in_prompt: Whether the tools were described in the prompt, so that tool calls must be parsed from the text.
        names: The names under which the API got the tools.

    Raises:
        EngineError: If the endpoint filtered or aborted the reply.
    """
    choice = answer.choices[0]
    if choice.end in _REFUSED:
        raise EngineError(f"the endpoint stopped the reply with finish_reason {choice.finish_reason!r}")
    parts = parts_read(choice.message.content)
    message = _message_of(choice.message, parts, tools, names, in_prompt=in_prompt)
    if "tool_calls" not in message:
        in_text = looks_like_call(message["content"], tools)
        if in_text or _is_no_call(choice):
            message["tool_calls"] = [raw_call(message["content"])]
        if in_text:
            _say_call_in_text()
    reason: FinishReason = "length" if choice.end in _LENGTH else "stop"
    for kind in parts.unread:
        _say_unread(kind)
    usage = replace(_usage_of(answer.usage, message), unread_parts=len(parts.unread))
    return MessageCompletion(message=message, finish_reason=reason, usage=usage)


@cache
def _say_unread(kind: str) -> None:
    log.warning(
        "an endpoint's reply has a part of the type %r, which is neither text nor reasoning: such parts are left out, "
        "and counted as usage/unread_parts",
        kind,
    )


@cache
def _say_call_in_text() -> None:
    log.warning(
        "an endpoint's reply has a tool call in its text, which is a malformed call: start its server with a parser "
        'for the tool calls of the model, or set tools="prompt"'
    )


def _message_of(read: _Message, parts: Parts, tools: Tools, names: SentNames, *, in_prompt: bool) -> Message:
    content = parts.text or read.refusal or ""
    reasoning = read.reasoning_content or read.reasoning or parts.reasoning
    extra = read.extra | ({"content": read.content} if parts.reasoning else {})
    if not reasoning:  # Otherwise the endpoint itself has separated them.
        reasoning, content = split_reasoning(content)
    calls = read.tool_calls or ()
    if in_prompt and tools and not calls:
        message = HERMES.parse(content, tools, inside=False)
    else:
        message = message_of(content, {"content": content, "tool_calls": [_read_call(call, names) for call in calls]})
        for made, call in zip(message.get("tool_calls", ()), calls, strict=True):
            if beside := call.extra | ({"function": call.function.extra} if call.function.extra else {}):
                made["extra"] = beside
    if reasoning:
        message["reasoning_content"] = reasoning
    if extra:
        message["extra"] = extra
    return message


def _read_call(call: _Call, names: SentNames) -> dict[str, Any]:
    function = {"name": names.own(call.function.name), "arguments": _arguments(call.function.arguments)}
    return {"id": call.id and whole_characters(call.id), "function": function}


def _arguments(written: str | dict[str, Any] | None) -> Any:
    """Return a call's arguments, parsed if they are valid JSON, else as the text that the model wrote."""
    if not isinstance(written, str):
        return written or {}
    if not written.strip():
        return {}
    ok, value, end = json_at(written, 0)
    return value if ok and skip_blanks(written, end) == len(written) else written


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
