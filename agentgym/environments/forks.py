"""What an env asks of its rollout: forks and sub-agents, and model roles."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

from pydantic import BaseModel

from agentgym.types.messages import Message

ForkKind: TypeAlias = Literal["fork", "subagent"]
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class ForkedAgent(Protocol):
    """A fork or a sub-agent of a running rollout: a conversation of its own, under the same limits."""

    stop_reason: str | None
    """Why the agent ended, such as "answer" or the name of a limit; None while it runs."""

    @property
    def env(self) -> Any:
        """The copy of the env that its tools run on: `env.sandbox` is its own where it was forked with one."""
        ...

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, prompt included."""
        ...

    async def run(self) -> str:
        """Play with tool calls until the agent answers without a call or a tool stops it, and return the text.

        The text is "" where a limit ended the agent first.
        """
        ...

    async def turn(self) -> Message | None:
        """Sample one assistant message; None where a limit ended the agent."""
        ...

    def reply(self, messages: Sequence[Message]) -> None:
        """Answer the agent's last turn; where the answer overflows the context, the next `turn` gives None."""
        ...


class Model(ABC):
    """A model role of a rollout, such as a judge: it is asked for text, and none of its tokens is trained on."""

    name: str
    """The name that it was given under."""
    calls: int
    """How often its engine was asked in this rollout, repeated questions too."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells its answers from those of another model: its name on disk or on a hub, and its version.

        "" where its engine does not say its name (`model_name`), such as a `Scripted`: nothing tells it apart then.
        """

    @abstractmethod
    def count(self, what: str, number: float = 1.0) -> None:
        """Add to the metric `model_WHAT/NAME` of the rollout."""

    @overload
    async def ask(
        self,
        messages: str | Sequence[Message],
        response: None = None,
        *,
        max_tokens: int = ...,
        temperature: float = ...,
        retries: int = ...,
        timeout_s: float = ...,
    ) -> str: ...
    @overload
    async def ask(
        self,
        messages: str | Sequence[Message],
        response: type[AnswerT],
        *,
        max_tokens: int = ...,
        temperature: float = ...,
        retries: int = ...,
        timeout_s: float = ...,
    ) -> AnswerT: ...
    async def ask(
        self,
        messages: str | Sequence[Message],
        response: type[BaseModel] | None = None,
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        retries: int = 2,
        timeout_s: float = 120.0,
    ) -> Any:
        """Return the model's answer to a conversation, or to one question: its text, or the `response` in it.

        With a pydantic model as `response`, it is asked for one JSON object of that schema. One that does not fit is
        answered with what is wrong, and asked for again. The same question is asked again where the engine fails, each
        time after a longer wait. All of this `retries` times at most. The rollout's time limits stand still meanwhile;
        `timeout_s` bounds the whole.

        :raises EngineError: where it has not answered after all; the rollout has no reward then.
        :raises EnvError: where the messages do not fit its context.
        """
        return (await self._ask(messages, response, max_tokens, temperature, retries, timeout_s))[1]

    async def ask_json(
        self,
        messages: str | Sequence[Message],
        response: type[AnswerT],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        retries: int = 2,
        timeout_s: float = 120.0,
    ) -> tuple[str, AnswerT]:
        """Return the JSON object that the model wrote, and the `response` in it; the rest is as for `ask`."""
        return await self._ask(messages, response, max_tokens, temperature, retries, timeout_s)

    @abstractmethod
    async def _ask(
        self,
        messages: str | Sequence[Message],
        response: type[BaseModel] | None,
        max_tokens: int,
        temperature: float,
        retries: int,
        timeout_s: float,
    ) -> tuple[str, Any]:
        """Return what the model wrote, and what was read of it."""
