"""Turns of engines that are asked with messages, beside those of engines that are asked with ids."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from agentgym.chat.chat import Chat
from agentgym.chat.message_chat import FILL, MessageChat
from agentgym.engines.base import Engine
from agentgym.engines.messages import NO_POLICY, MessageCompletion, speaks_messages
from agentgym.messages import Message
from agentgym.types import Completion, Version

AnyChat: TypeAlias = Chat | MessageChat


def open_chat(engine: Engine, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> AnyChat:
    """Return the chat that a conversation with this engine is kept in."""
    if speaks_messages(engine):
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
