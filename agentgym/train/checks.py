"""Samples and models that a step would fail on or compute wrongly, refused by name before the first forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentgym.types import Sample

ABOVE_0 = 1e-3
"""Nats by which an engine's rounding may put the log-probability of a certain token above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model can be given."""

    vocabulary: int
    """Token ids are below it."""
    positions: int | None
    """Most tokens of a row; None where the model names no limit."""

    @classmethod
    def of(cls, causal: Any) -> "ModelLimits":
        """Those of a transformers model."""
        layers = (causal.get_input_embeddings(), causal.get_output_embeddings())
        rows = [layer.weight.shape[0] for layer in layers if hasattr(layer, "weight")]
        return cls(vocabulary=min(rows), positions=_positions(causal.config.get_text_config()))

    def refuse(self, samples: Sequence[Sample]) -> None:
        """Raise ValueError for a sample that the model cannot be given, or that no engine can have made."""
        for row in samples:
            whose = f"samples: rollout {row.rollout_id!r}, segment {row.segment}, step {row.step}"
            low = min(int(row.prompt_ids.min()), int(row.response_ids.min()))
            high = max(int(row.prompt_ids.max()), int(row.response_ids.max()))
            if low < 0 or high >= self.vocabulary:
                raise ValueError(
                    f"{whose} has the token id {low if low < 0 else high}, and the model's ids are 0 to "
                    f"{self.vocabulary - 1}; sample with the tokenizer of the model that is trained"
                )
            if self.positions is not None and len(row) > self.positions:
                raise ValueError(
                    f"{whose} has {len(row)} tokens, and the model's positions end at {self.positions} "
                    "(max_position_embeddings); lower the engine's context_tokens"
                )
            if not np.isfinite(np.where(row.loss_mask, row.logprobs, 0.0)).all():
                raise ValueError(
                    f"{whose} has a log-probability that is not finite; give what the engine sampled each token with"
                )
            if (highest := float(np.where(row.loss_mask, row.logprobs, -1.0).max())) > ABOVE_0:
                raise ValueError(
                    f"{whose} has the log-probability {highest:.4g} above 0; give logarithms of probabilities, in nats"
                )


def _positions(config: Any) -> int | None:
    """Where the positions end, those that a scaled rotation adds included."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor = rope.get("factor")
    if not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * (rope.get("original_max_position_embeddings") or limit)))
