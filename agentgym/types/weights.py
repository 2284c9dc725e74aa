"""Weights that a trainer passes to an engine: an adapter, or the weights of a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter in PEFT's format: its config, and its tensors by PEFT's names, on the CPU."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    """The weights of a model that is trained as a whole, not with an adapter: on the CPU, and without frozen ones."""

    tensors: Mapping[str, Any]
    """Weights by their names in the model; of tied weights, only the first name is included."""
    files: Mapping[str, Any]
    """The same weights by their names in the model's files, some of them split or merged differently."""
