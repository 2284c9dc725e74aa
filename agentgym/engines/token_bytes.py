"""The bytes of the token ids of several engines, for who keeps rollouts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentgym.engines.base import Engine
from agentgym.engines.messages import MessageEngine


def bytes_by_model(policy: Engine, models: Mapping[str, Engine]) -> Callable[[str, Sequence[int]], dict[int, bytes]]:
    """Return a function that gives the bytes of token ids of a model role, "" for the policy.

    A tokenizer without a method `token_bytes` is asked to decode each id alone. Nothing is given of an engine that is
    asked with messages, whose ids mean nothing, and of a model that is not among these.
    """
    return bytes_of(tokenizers_of(policy, models))  # now: what is kept last is kept when the engines are closed


def tokenizers_of(policy: Engine, models: Mapping[str, Engine]) -> dict[str, Any]:
    """Return the tokenizers of these models, "" for the policy; those that are asked with messages have none."""
    engines = {**models, "": policy}
    return {name: engine.tokenizer for name, engine in engines.items() if not isinstance(engine, MessageEngine)}


def bytes_of(tokenizers: Mapping[str, Any]) -> Callable[[str, Sequence[int]], dict[int, bytes]]:
    """Return a function that gives the bytes of token ids under the tokenizer of a name, as `bytes_by_model` does."""

    def token_bytes(model: str, ids: Sequence[int]) -> dict[int, bytes]:
        if (tokenizer := tokenizers.get(model)) is None:
            return {}
        known: Callable[[Sequence[int]], dict[int, bytes]] | None = getattr(tokenizer, "token_bytes", None)
        if known is not None:
            return known(ids)
        return {token_id: tokenizer.decode([token_id]).encode("utf-8", "replace") for token_id in ids}

    return token_bytes
