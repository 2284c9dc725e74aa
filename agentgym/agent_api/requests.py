"""What both APIs share: requests, responses, the interface of the policy, and the errors of refused requests."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from agentgym.types.messages import Message

AnswerEnd: TypeAlias = Literal["stop", "tool_calls", "stop_text", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One request of an agent: the whole conversation so far, and settings for the response."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of the agent's tools, in OpenAI's format."""
    model: str
    """The model name in the request. Any name is accepted, and the response repeats it."""
    max_tokens: int | None = None
    """Maximum number of ids in the response. None: only the env's limits apply."""
    stop: tuple[str, ...] = ()
    """Texts that end the response."""
    stream: bool = False
    """Whether to send the response as server-sent events."""
    shows_usage: bool = True
    """Whether to include token counts in the events."""
    not_followed: tuple[str, ...] = ()
    """Names of the request's settings that are ignored, to warn about them."""
    size: int = 0
    """Size of the request's body in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """One sampled turn in the form that the agent receives."""

    message: Message
    end: AnswerEnd
    stop_text: str | None = None
    """The text of `AgentRequest.stop` that ended the turn, or None. The message doesn't include it."""
    prompt_tokens: int
    sampled_tokens: int


class Policy(Protocol):
    """The policy of one rollout. Each call passes a whole conversation, because agents send it with every request."""

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Sample the next turn of a conversation.

        Raises:
            RefusedError: If the request is invalid, or a limit doesn't allow another turn.
        """
        ...

    async def count(self, request: AgentRequest) -> int:
        """Return how many ids a request's prompt has: those of its conversation, up to the opening of the next turn."""
        ...


class RefusedError(Exception):
    """Raised if a request is refused. The message is sent to the agent as the response and says why."""

    def __init__(self, message: str, *, field: str | None = None, status: int = 400, kind: str = "invalid") -> None:
        super().__init__(message)
        self.message, self.field, self.status, self.kind = message, field, status, kind


class LimitError(RefusedError):
    """A request is refused because of a limit of the rollout. `reason` is the limit's name, such as "turns"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, status=400 if reason == "context" else 403, kind=reason)
        self.reason = reason

    @property
    def is_final(self) -> bool:
        """Whether all further requests of the rollout will be refused, too.

        This is False for the limit "context", because a shorter request may still fit.
        """
        return self.reason != "context"
