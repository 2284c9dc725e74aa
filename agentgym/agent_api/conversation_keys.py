"""Keys of the prefixes of an agent's conversation, which tell whether a request continues an earlier one."""

import hashlib
import json
from typing import Any

from agentgym.agent_api.requests import AgentRequest
from agentgym.types.messages import Message


def beginnings(request: AgentRequest) -> list[str]:
    """Return the key of the tools, followed by the key of each prefix of the conversation."""
    keys = [_hashed("", request.tools)]
    for message in request.messages:
        keys.append(next_key(keys[-1], message))
    return keys


def head_of(request: AgentRequest) -> str:
    """Return the key of the tools and the leading system messages."""
    key = _hashed("", request.tools)
    for message in request.messages:
        if message["role"] != "system":
            break
        key = next_key(key, message)
    return key


def next_key(key: str, message: Message) -> str:
    """Return the key of a conversation extended by a message.

    A turn is compared without spaces at its ends, its reasoning, and the ids of its calls.
    """
    content = message["content"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    is_turn = message["role"] == "assistant"
    return _hashed(key, [message["role"], content.strip() if is_turn else content, calls, message.get("tool_call_id")])


def _hashed(key: str, value: Any) -> str:
    text = json.dumps([key, value], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
