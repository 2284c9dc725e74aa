"""The gradient of each log-probability, computed from that log-probability before all of them are known."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.train.batching.layouts import Inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """A loss in which a token's gradient depends only on that token's log-probability."""

    term: Callable[[Tensor], Tensor]
    """The scalar on which `backward` will be called, as a function of the log-probabilities (BR)."""
    possible_BR: Tensor
    """bool: the tokens that can have a nonzero gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleUpstream:
    """The gradients of a forward pass's N log-probabilities under a loss over samples."""

    loss: TokenLoss
    inputs: Inputs
    loss_mask_BR: Tensor
    possible_N: Tensor
    """bool: the tokens that can get a nonzero gradient."""

    @classmethod
    def of(cls, loss: TokenLoss, inputs: Inputs, loss_mask_BR: Tensor) -> "SampleUpstream":
        """Return the gradients of one micro-batch. A shared token is possible if it is possible in any sample."""
        possible_N = torch.zeros_like(inputs.target_N, dtype=torch.bool)
        possible_N[inputs.index_M[loss.possible_BR[loss_mask_BR]]] = True
        return cls(loss=loss, inputs=inputs, loss_mask_BR=loss_mask_BR, possible_N=possible_N)

    def __call__(self, rows_C: Tensor, logprobs_C: Tensor) -> Tensor:
        """Return the gradient of the tokens in these rows. All other log-probabilities are treated as 0."""
        with torch.enable_grad():
            leaf_C = logprobs_C.detach().requires_grad_()
            all_N = leaf_C.new_zeros(len(self.possible_N)).index_copy(0, rows_C, leaf_C)
            loss = self.loss.term(self.inputs.scatter_to_samples(all_N, self.loss_mask_BR))
            return torch.autograd.grad(loss, leaf_C)[0]
