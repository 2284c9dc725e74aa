"""A short training run of a full model, identical in every process of a test."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from agentgym.train.trainer import Trainer
from agentgym.types.sample import Sample

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
Result: TypeAlias = tuple[list[dict[str, float]], dict[str, Any]]
"""The metrics of each step, and the weights after the last one."""


def train(trainer: Trainer, batches: Sequence[list[Sample]]) -> Result:
    """Train on these batches and return metrics and weights."""
    stats = [{k: v for k, v in trainer.train(batch).items() if k != "train/seconds"} for batch in batches]
    weights = trainer.weights()
    assert weights is not None
    return stats, {name: tensor.float().numpy() for name, tensor in weights.tensors.items()}
