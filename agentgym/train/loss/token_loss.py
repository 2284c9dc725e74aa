"""The gradient of each log-probability, told from that log-probability before all of them are known."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.train.batching.layouts import Inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """A loss of which a token's gradient depends on that token's log-probability alone."""

    term: Callable[[Tensor], Tensor]
    """The scalar that `backward` will be called on, from the log-probabilities (BR)."""
    possible_BR: Tensor
    """bool: the tokens that can have a gradient other than 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleUpstream:
    """The gradient that comes back to the N log-probabilities of a forward, by a loss over samples."""

    loss: TokenLoss
    inputs: Inputs
    loss_mask_BR: Tensor
    possible_N: Tensor
    """bool: the tokens that a gradient other than 0 can come back to."""

    @classmethod
    def of(cls, loss: TokenLoss, inputs: Inputs, loss_mask_BR: Tensor) -> "SampleUpstream":
        """Return it for one micro-batch; a token that samples share is possible if it is in any of them."""
        possible_N = torch.zeros_like(inputs.target_N, dtype=torch.bool)
        possible_N[inputs.index_M[loss.possible_BR[loss_mask_BR]]] = True
        return cls(loss=loss, inputs=inputs, loss_mask_BR=loss_mask_BR, possible_N=possible_N)

    def __call__(self, rows_C: Tensor, logprobs_C: Tensor) -> Tensor:
        """Return the gradient of the tokens in these rows; the others' log-probabilities count as 0 meanwhile."""
        with torch.enable_grad():
            leaf_C = logprobs_C.detach().requires_grad_()
            all_N = leaf_C.new_zeros(len(self.possible_N)).index_copy(0, rows_C, leaf_C)
            loss = self.loss.term(self.inputs.scatter_to_samples(all_N, self.loss_mask_BR))
            return torch.autograd.grad(loss, leaf_C)[0]
