"""The map from an output layer's logits to those of the softmax, at a temperature."""

from dataclasses import dataclass

from torch import Tensor

from agentgym.causal_lm.logit_map import LogitMap


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
