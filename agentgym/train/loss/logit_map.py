"""The map from an output layer's logits to the logits of the softmax."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitMap:
    """How a model changes its output layer's logits: by a factor, then by a soft cap (arXiv 2408.00118)."""

    scale: float = 1.0
    """Factor of the logits, such as Cohere's logit_scale or 1 / Granite's logits_scaling."""
    cap: float | None = None
    """Bound c of the logits, which become c tanh(logit / c); None sets no bound."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given those of its output layer."""
        scaled = logits if self.scale == 1 else logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


PLAIN = LogitMap()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The map from the output layer's logits to those of the softmax: the model's map, then the temperature."""

    temperature: float
    logits: LogitMap

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits of the softmax, given those of the output layer."""
        return self.logits(logits) / self.temperature

    def in_place(self, logits: Tensor) -> Tensor:
        """Return the logits of the softmax, overwriting those of the output layer."""
        if self.logits.scale != 1:
            logits.mul_(self.logits.scale)
        if self.logits.cap is not None:
            logits.div_(self.logits.cap).tanh_().mul_(self.logits.cap)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    @property
    def scale(self) -> float:
        """Derivative of the softmax's logits with respect to the output layer's logits, if there is no cap."""
        return self.logits.scale / self.temperature

    def bend(self, mapped: Tensor) -> Tensor | None:
        """Return the factor by which the cap reduces the derivative at these mapped logits, or None without a cap."""
        cap = self.logits.cap
        return None if cap is None else 1 - (mapped * (self.temperature / cap)).square()
