"""The protocol of engines that take messages and return one message, such as chat endpoints."""

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
"""Policy version of turns whose token ids and log-probabilities are unknown. It is different from the version of every
policy that is trained.
"""
AnyChat: TypeAlias = Chat | MessageChat


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of tokens and requests, and the cost, of one or more completions, as the engine reports them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engine had already computed. They are included in `prompt_tokens`."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Reasoning tokens, which later prompts don't contain. They are included in `completion_tokens`."""
    cost: float = 0.0
    """Total price, in the currency of the engine's prices."""
    requests: int = 0
    uncounted_requests: int = 0
    """Requests whose responses had no token counts. Their tokens are estimated and cost nothing."""
    unread_parts: int = 0
    """Parts of replies that are neither text nor reasoning, and were left out."""
    sent_again: int = 0
    """Number of times that a request was sent again after a failure. They are not included in `requests`."""

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self, model: str = "") -> dict[str, float]:
        """Return the nonzero counts under the names that they have in a rollout's metrics.

        Args:
            model: The model role that the counts belong to; "" for the policy. For a model role, only the tokens, the
                cost, the requests that were sent again and the unread parts are returned.
        """
        if not model:
            return {f"usage/{f.name}": float(value) for f in fields(self) if (value := getattr(self, f.name))}
        counts = {"tokens": self.completion_tokens, "prompt_tokens": self.prompt_tokens, "cost": self.cost}
        counts |= {"sent_again": self.sent_again, "unread_parts": self.unread_parts}
        return {f"model_{what}/{model}": float(value) for what, value in counts.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageCompletion:
    """A reply from an engine that takes messages.

    `usage.completion_tokens` is at most the `max_tokens` of the request.
    """

    message: Message
    finish_reason: FinishReason
    usage: Usage


@runtime_checkable
class MessageEngine(Protocol):
    """An engine that takes messages instead of token ids.

    Conversations call its `generate_message` instead of `generate`.
    """

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
        """Generate one assistant message that continues the conversation.

        Cancelling the call frees its slot.

        Args:
            messages: The conversation so far.
            tools: JSON descriptions of the tools that the model may call.
            session: Name of the conversation.
            max_tokens: Maximum number of tokens in the reply.
            sampling: Sampling parameters.
            seed: Seed of the sampling.

        Raises:
            EngineError: If the engine can't generate a reply.
        """
        ...


def refuse_in_training(engine: object) -> None:
    """Raise ValueError if the engine takes messages, because training needs token ids and log-probabilities."""
    if isinstance(engine, MessageEngine):
        raise ValueError(
            f"engine: {type(engine).__name__} returns neither token ids nor log-probabilities, so it is only for "
            "evaluation; train with ag.TransformersEngine or SGLang"
        )


def open_chat(engine: Engine, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> AnyChat:
    """Return a new chat for a conversation with this engine. Its class depends on whether the engine takes messages."""
    if hasattr(engine, "generate_message"):  # Equivalent to `isinstance` with MessageEngine, at a tenth of the cost.
        return MessageChat(tools, messages, call_example=getattr(engine, "call_example", ""))
    return Chat(engine.tokenizer, tools, messages)


def counted(reply: MessageCompletion) -> Completion:
    """Convert a reply to a completion, for code that works on ids.

    The completion has one placeholder id for each token of the reply. Reasoning tokens don't count, because later
    prompts don't contain them. There is at least one id, even if there are no tokens.
    """
    tokens = max(1, reply.usage.completion_tokens - reply.usage.reasoning_tokens)
    return Completion(
        token_ids=np.full(tokens, FILL),
        logprobs=np.zeros(tokens, np.float32),
        finish_reason=reply.finish_reason,
        versions=(Version(0, NO_POLICY),),
    )
