"""What both APIs make of a request, what answers it, and the errors that a request is refused with."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from agentgym.types.messages import Message

AnswerEnd: TypeAlias = Literal["stop", "tool_calls", "stop_text", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One request of an agent: the whole conversation so far, and what it asks of the answer."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The schemas of its tools, in the OpenAI shape."""
    model: str
    """The name that the agent gave; any is taken, and given back."""
    max_tokens: int | None = None
    """The most ids of the answer; None leaves this to the env's limits."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    stream: bool = False
    """Whether the answer is sent as events."""
    shows_usage: bool = True
    """Whether the events say how many tokens there were."""
    not_followed: tuple[str, ...] = ()
    """The names of the settings in it that sampling does not follow."""
    size: int = 0
    """Bytes of the body that it was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """One sampled turn, as the agent is to see it."""

    message: Message
    end: AnswerEnd
    stop_text: str | None = None
    """The text of `AgentRequest.stop` that ended it; it is no part of the message."""
    prompt_tokens: int
    sampled_tokens: int


class Policy(Protocol):
    """The policy of one rollout, asked with whole conversations."""

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Sample the next turn of a conversation; RefusedError where the request or a limit does not allow it."""
        ...

    async def count(self, request: AgentRequest) -> int:
        """Return how many ids the conversation of a request has, up to the open turn."""
        ...


class RefusedError(Exception):
    """A request that is answered with an error; its text tells the agent why."""

    def __init__(self, message: str, *, field: str | None = None, status: int = 400, kind: str = "invalid") -> None:
        super().__init__(message)
        self.message, self.field, self.status, self.kind = message, field, status, kind


class LimitError(RefusedError):
    """A limit of the rollout is reached; `reason` is its name, such as "turns"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, status=400 if reason == "context" else 403, kind=reason)
        self.reason = reason

    @property
    def is_final(self) -> bool:
        """Whether no other request of the rollout can be answered either; a shorter one fits the context."""
        return self.reason != "context"
