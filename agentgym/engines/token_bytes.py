"""Looks up the text of token ids as bytes. The store of rollouts needs it for the policy and each model role."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentgym.engines.base import Engine
from agentgym.engines.messages import MessageEngine


def bytes_by_model(policy: Engine, models: Mapping[str, Engine]) -> Callable[[str, Sequence[int]], dict[int, bytes]]:
    """Return a function that takes a model role ("" for the policy) and token ids, and returns the bytes of each id.

    If a tokenizer has no `token_bytes` method, each id is decoded alone. The function returns {} for an unknown model
    role, and for an engine that takes messages, because the ids of its turns are placeholders.
    """
    # The tokenizers are looked up here, because rollouts are still stored after the engines close.
    return bytes_of(tokenizers_of(policy, models))


def tokenizers_of(policy: Engine, models: Mapping[str, Engine]) -> dict[str, Any]:
    """Return the engines' tokenizers by model role ("" for the policy). Engines that take messages are left out."""
    engines = {**models, "": policy}
    return {name: engine.tokenizer for name, engine in engines.items() if not isinstance(engine, MessageEngine)}


def bytes_of(tokenizers: Mapping[str, Any]) -> Callable[[str, Sequence[int]], dict[int, bytes]]:
    """Return the same function as `bytes_by_model`, from the tokenizers instead of the engines."""

    def token_bytes(model: str, ids: Sequence[int]) -> dict[int, bytes]:
        if (tokenizer := tokenizers.get(model)) is None:
            return {}
        known: Callable[[Sequence[int]], dict[int, bytes]] | None = getattr(tokenizer, "token_bytes", None)
        if known is not None:
            return known(ids)
        return {token_id: tokenizer.decode([token_id]).encode("utf-8", "replace") for token_id in ids}

    return token_bytes
