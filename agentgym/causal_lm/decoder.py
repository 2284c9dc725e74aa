"""The decoder of a causal language model."""

from typing import Any


def decoder_of(causal: Any) -> Any:
    """Return the part of a transformers model that turns ids into hidden states.

    Raises:
        ValueError: If the model has no such part.
    """
    embedding = causal.get_input_embeddings()
    for part in (causal.get_decoder(), getattr(causal, causal.base_model_prefix, None), getattr(causal, "model", None)):
        if part is not None and part is not causal and any(other is embedding for other in part.modules()):
            return part
    raise ValueError(f"model: {causal.config.model_type} has no separate decoder; use a causal language model")
