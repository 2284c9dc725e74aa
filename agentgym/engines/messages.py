"""The protocol of engines that are asked with messages and answer with one, such as chat endpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from agentgym.chat.chat import Chat
from agentgym.chat.message_chat import FILL, MessageChat
from agentgym.engines.base import Engine
from agentgym.types.completion import Completion, FinishReason, Sampling, Version
from agentgym.types.messages import Message

NO_POLICY = -1
"""The policy version of turns whose ids and log-probabilities are not known: they are no policy's that is trained."""
AnyChat: TypeAlias = Chat | MessageChat


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one answer, or many, took by the engine's own count."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that the engine had computed before; they are among `prompt_tokens`."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Tokens of the reasoning that no later prompt holds; they are among `completion_tokens`."""
    cost: float = 0.0
    """The price of it all, in the currency of the engine's prices."""
    requests: int = 0
    uncounted_requests: int = 0
    """Requests whose answers came without a count; their tokens are estimated here, and cost nothing."""

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self, model: str = "") -> dict[str, float]:
        """Return the counts as a rollout's metrics have them, without those that are 0.

        Those of the policy, or the tokens and the cost of a model role.
        """
        if not model:
            return {f"usage/{f.name}": float(value) for f in fields(self) if (value := getattr(self, f.name))}
        counts = {"tokens": self.completion_tokens, "prompt_tokens": self.prompt_tokens, "cost": self.cost}
        return {f"model_{what}/{model}": float(value) for what, value in counts.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageCompletion:
    """An engine's answer as a message; `max_tokens` of the request bounds its `usage.completion_tokens`."""

    message: Message
    finish_reason: FinishReason
    usage: Usage


@runtime_checkable
class MessageEngine(Protocol):
    """An engine that a conversation asks by `generate_message`, in the place of `generate`: it knows no token ids."""

    async def generate_message(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        session: str,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> MessageCompletion:
        """Answer the conversation with one assistant message of at most `max_tokens` tokens.

        EngineError where the engine cannot answer. Cancelling the call frees its place.
        """
        ...


def refuse_in_training(engine: object) -> None:
    """Raise ValueError for an engine that is asked with messages: nothing can be trained on what it says."""
    if isinstance(engine, MessageEngine):
        raise ValueError(
            f"engine: {type(engine).__name__} gives neither token ids nor log-probabilities, so it is for evaluation; "
            "train with ag.TransformersEngine or SGLang"
        )


def open_chat(engine: Engine, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> AnyChat:
    """Return the chat that a conversation with this engine is kept in."""
    if hasattr(engine, "generate_message"):  # What `isinstance` says, at a tenth of its cost.
        return MessageChat(tools, messages)
    return Chat(engine.tokenizer, tools, messages)


def counted(reply: MessageCompletion) -> Completion:
    """Return an answer as ids that only count: those tokens of it that later prompts hold, and at least one."""
    tokens = max(1, reply.usage.completion_tokens - reply.usage.reasoning_tokens)
    return Completion(
        token_ids=np.full(tokens, FILL),
        logprobs=np.zeros(tokens, np.float32),
        finish_reason=reply.finish_reason,
        versions=(Version(0, NO_POLICY),),
    )
