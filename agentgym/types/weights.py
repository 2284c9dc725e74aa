"""What a trainer gives an engine: an adapter, or the weights of a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter in PEFT's terms: its config and its tensors by PEFT's names, on the CPU."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    """The weights of a model that is trained whole, on the CPU; weights that are not trained are not among them."""

    tensors: Mapping[str, Any]
    """Weights by their names in the model; of weights that are one, only the first name is there."""
    files: Mapping[str, Any]
    """The same weights by their names in the model's files, where some are cut or joined otherwise."""
