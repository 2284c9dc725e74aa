"""Hashes of an agent's conversations, by which a request is recognized as the continuation of an earlier one.

Each prefix of a conversation has a hash, its key.
"""

import hashlib
import json
from typing import Any

from agentgym.agent_api.requests import AgentRequest
from agentgym.types.messages import Message


def beginnings(request: AgentRequest) -> list[str]:
    """Return the keys of all prefixes of a request's conversation, the shortest first.

    The first key is that of the tools alone. Each further key adds one message.
    """
    keys = [_hashed("", request.tools)]
    for message in request.messages:
        keys.append(next_key(keys[-1], message))
    return keys


def head_of(request: AgentRequest) -> str:
    """Return the key of the tools and the leading system messages, which a compacted conversation keeps."""
    key = _hashed("", request.tools)
    for message in request.messages:
        if message["role"] != "system":
            break
        key = next_key(key, message)
    return key


def next_key(key: str, message: Message) -> str:
    """Return the key of a conversation extended by one message.

    Agents may change an assistant message slightly when they send it back. Its key therefore ignores its reasoning,
    the ids of its calls, and whitespace at both ends of its content.
    """
    content = message["content"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    is_turn = message["role"] == "assistant"
    return _hashed(key, [message["role"], content.strip() if is_turn else content, calls, message.get("tool_call_id")])


def _hashed(key: str, value: Any) -> str:
    text = json.dumps([key, value], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
