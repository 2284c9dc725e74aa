"""The requests and responses shared by both APIs, the policy's interface, and the errors of refused requests."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from agentgym.types.messages import Message

AnswerEnd: TypeAlias = Literal["stop", "tool_calls", "stop_text", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One request of an agent: the whole conversation so far, and the options for the response."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of its tools, in OpenAI's format."""
    model: str
    """The model name in the request; any name is accepted and returned."""
    max_tokens: int | None = None
    """Maximum number of ids in the response; None leaves this to the env's limits."""
    stop: tuple[str, ...] = ()
    """Texts that end the response."""
    stream: bool = False
    """Whether the response is sent as events."""
    shows_usage: bool = True
    """Whether the events include token counts."""
    not_followed: tuple[str, ...] = ()
    """Names of settings in the request that are ignored."""
    size: int = 0
    """Bytes of the request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """One sampled turn in the form that the agent receives."""

    message: Message
    end: AnswerEnd
    stop_text: str | None = None
    """The text of `AgentRequest.stop` that ended the turn; the message doesn't include it."""
    prompt_tokens: int
    sampled_tokens: int


class Policy(Protocol):
    """The policy of one rollout, which is queried with whole conversations."""

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Sample the next turn of a conversation.

        Raises:
            RefusedError: If the request is invalid, or a limit doesn't allow another turn.
        """
        ...

    async def count(self, request: AgentRequest) -> int:
        """Return the number of ids in a request's conversation, up to the open turn."""
        ...


class RefusedError(Exception):
    """Raised if a request is refused; the message, which is the response, tells the agent why."""

    def __init__(self, message: str, *, field: str | None = None, status: int = 400, kind: str = "invalid") -> None:
        super().__init__(message)
        self.message, self.field, self.status, self.kind = message, field, status, kind


class LimitError(RefusedError):
    """A limit of the rollout was reached; `reason` is its name, such as "turns"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, status=400 if reason == "context" else 403, kind=reason)
        self.reason = reason

    @property
    def is_final(self) -> bool:
        """Whether all further requests of the rollout will be refused, too; a shorter one may still fit the context."""
        return self.reason != "context"
