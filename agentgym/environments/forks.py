"""The protocols of forks and sub-agents."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, TypeAlias

from agentgym.messages import Message

ForkKind: TypeAlias = Literal["fork", "subagent"]


class ForkedAgent(Protocol):
    """A fork or a sub-agent of a running rollout: a conversation of its own, under the same limits.

    Its turns are trained with the rollout's one reward; where a limit ends it, `stop_reason` says which.
    """

    stop_reason: str | None

    @property
    def env(self) -> Any:
        """The copy of the env that its tools run on: `env.box` is its own where it was forked with one."""
        ...

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, prompt included."""
        ...

    async def run(self) -> str:
        """Let it play, tool calls and all, until it answers without a call or a tool stops it; the text.

        "" where a limit ended it first.
        """
        ...

    async def turn(self) -> Message | None:
        """One assistant message; None where a limit ended it."""
        ...

    def reply(self, messages: Sequence[Message]) -> None:
        """Answer its last turn; an overflowing answer is cut, and the next `turn` is None."""
        ...


class ForkManager(Protocol):
    """What a runner gives an env so that it can fork."""

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
        """A forked agent of the conversation this belongs to."""
        ...
