"""Protocols of forks and sub-agents: conversations that an env opens inside a rollout."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, TypeAlias

from agentgym.messages import Message

ForkKind: TypeAlias = Literal["fork", "subagent"]


class ForkedAgent(Protocol):
    """A fork or a sub-agent of a running rollout: a conversation of its own, under the same limits.

    Its turns are trained with the rollout's one reward.
    """

    stop_reason: str | None
    """Why the agent ended, such as "answer" or the name of a limit; None while it runs."""

    @property
    def env(self) -> Any:
        """The copy of the env that its tools run on: `env.box` is its own where it was forked with one."""
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


class ForkManager(Protocol):
    """The part of a runner that opens forks and sub-agents for an env."""

    def fork(
        self,
        env: Any,
        kind: ForkKind,
        messages: Sequence[Message],
        *,
        tools: Sequence[str] | None,
        box: bool,
        turns: int | None,
    ) -> AbstractAsyncContextManager[ForkedAgent]:
        """Open a fork or a sub-agent of the running conversation; the arguments are those of `Env.fork`."""
        ...
