"""An adapter on its way from the trainer to an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter in PEFT's terms: its config and its tensors by PEFT's names, on the CPU."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Any]
