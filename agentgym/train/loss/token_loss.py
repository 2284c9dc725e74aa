"""Computes the gradient of each log-probability from its value alone, before the other log-probabilities are known."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.train.batching.layouts import Inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """A loss in which each token's gradient depends only on that token's own log-probability."""

    term: Callable[[Tensor], Tensor]
    """The scalar on which `backward` will be called, as a function of the log-probabilities ([B, R])."""
    possible_BR: Tensor
    """bool: the tokens that can have a nonzero gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleUpstream:
    """Computes the gradients of a forward pass's N log-probabilities from a loss over samples (an `Upstream`)."""

    loss: TokenLoss
    inputs: Inputs
    loss_mask_BR: Tensor
    possible_N: Tensor
    """bool: the tokens that can get a nonzero gradient."""

    @classmethod
    def of(cls, loss: TokenLoss, inputs: Inputs, loss_mask_BR: Tensor) -> "SampleUpstream":
        """Create it for one micro-batch.

        A shared token can get a gradient if it can in any of the samples that share it.
        """
        possible_N = torch.zeros_like(inputs.target_N, dtype=torch.bool)
        possible_N[inputs.index_M[loss.possible_BR[loss_mask_BR]]] = True
        return cls(loss=loss, inputs=inputs, loss_mask_BR=loss_mask_BR, possible_N=possible_N)

    def __call__(self, rows_C: Tensor, logprobs_C: Tensor) -> Tensor:
        """Return the gradients of the tokens in these rows.

        All other log-probabilities are taken as 0, which changes nothing, because a `TokenLoss` has no gradient
        across tokens.
        """
        with torch.enable_grad():
            leaf_C = logprobs_C.detach().requires_grad_()
            all_N = leaf_C.new_zeros(len(self.possible_N)).index_copy(0, rows_C, leaf_C)
            loss = self.loss.term(self.inputs.scatter_to_samples(all_N, self.loss_mask_BR))
            return torch.autograd.grad(loss, leaf_C)[0]
