"""Interfaces through which an env uses its rollout: forks and sub-agents, and model roles."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

from pydantic import BaseModel

from agentgym.types.messages import Message

ForkKind: TypeAlias = Literal["fork", "subagent"]
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class ForkedAgent(Protocol):
    """A fork or sub-agent of a running rollout: a separate conversation under the same limits."""

    stop_reason: str | None
    """Why the agent ended, such as "answer" or the name of a limit; None while it runs."""

    @property
    def env(self) -> Any:
        """The copy of the env that the agent's tools run on; with `fork(sandbox=True)`, its sandbox is a branch."""
        ...

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, including the prompt."""
        ...

    async def run(self) -> str:
        """Run turns and tool calls until the agent answers without a call or a tool stops it.

        Returns:
            The answer's text, the text of the message of the tool that stopped it, or "" if a limit ended the agent
            first.
        """
        ...

    async def turn(self) -> Message | None:
        """Sample one assistant message and return it, or None if a limit ended the agent."""
        ...

    def reply(self, messages: Sequence[Message]) -> None:
        """Respond to the agent's last turn; if the response overflows the context, the next `turn` returns None."""
        ...


class Model(ABC):
    """A model role of a rollout, such as a judge: it generates text, and none of its tokens are trained."""

    name: str
    """The name that the env uses for it, such as "judge"."""
    calls: int
    """Number of requests to its engine in this rollout, including repeated ones."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The model's name on disk or on a hub and its version, which tell its answers from those of another model.

        It is "" if the engine has no `model_name`, as in the case of `Scripted`.
        """

    @abstractmethod
    def count(self, what: str, number: float = 1.0) -> None:
        """Add `number` to the rollout's metric `model_WHAT/NAME`, where NAME is the name of this model role."""

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
        """Ask the model, and return the text of its answer, or the `response` object parsed from it.

        The request is repeated if the engine fails, each time after a longer wait. The rollout's time limits are paused
        meanwhile.

        Args:
            messages: The conversation, or the text of one question.
            response: A pydantic model; the model is then asked for one JSON object of that schema. If the object
                doesn't fit, the model is told what is wrong, and asked again. None returns the answer's text.
            max_tokens: Maximum number of sampled tokens.
            temperature: The sampling temperature.
            retries: Maximum number of retries, counting engine failures and unsuitable objects together.
            timeout_s: Maximum seconds for everything together.

        Raises:
            EngineError: If there is no answer after the last retry; the rollout then has no reward.
            EnvError: If the messages don't fit the model's context.
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
        """Return the JSON object that the model wrote, and the `response` parsed from it; otherwise like `ask`.

        Args:
            messages: The conversation, or the text of one question.
            response: The pydantic model of the JSON object.
            max_tokens: Maximum number of sampled tokens.
            temperature: The sampling temperature.
            retries: Maximum number of retries, as in `ask`.
            timeout_s: Maximum seconds for everything together.
        """
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
        """Return the text that the model wrote, and the value parsed from it."""
