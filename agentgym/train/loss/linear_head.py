"""Log-probabilities under a linear output layer. Gradients are computed in the forward pass if possible.

In the names of tensors, N stands for the tokens, V for the vocabulary's ids and H for the hidden size. C is a group
of the N tokens that is computed at once, and W the ids in one tile of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentgym.train.loss.scoring import Scoring
from agentgym.train.loss.tiles import Kept, Layer, Room, Scored, add_product, column, put, scan


class Upstream(Protocol):
    """Predicts, from a log-probability's value alone, the gradient that it will get in the backward pass."""

    @property
    def possible_N(self) -> Tensor:
        """bool, [N]: the tokens whose gradient may not be zero."""

    def __call__(self, rows_C: Tensor, logprobs_C: Tensor, /) -> Tensor:
        """Return the gradients of C of the N tokens, given these tokens' row indices and log-probabilities."""


def linear_logprobs(
    states_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    how: Scoring,
    *,
    entropy: bool,
    upstream: Upstream | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability and the entropy of each target, like `token_logprobs`."""
    with torch.autocast(states_NH.device.type, enabled=False):  # autocast would round sums to bfloat16
        out: tuple[Tensor, Tensor | None] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
            states_NH, weight_VH, bias_V, targets_N, how, entropy, torch.is_grad_enabled(), upstream
        )
    return out


def kept_rows(layer: Layer) -> int:
    """Return how many tokens' logits are in memory at once: as many as fit in 112 MiB on a CPU, 512 MiB on a GPU.

    There are at least 64, unless `layer.rows` is smaller, and at most `layer.rows`.
    """
    elements = 28 * 2**20 if layer.weight_VH.device.type == "cpu" else 128 * 2**20
    return min(max(64, elements // len(layer.weight_VH)), layer.rows)


@dataclass(slots=True, kw_only=True)
class _Found:
    """Results of the forward pass for all N tokens, filled one group of tokens at a time."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    log_z_N: Tensor
    others_N: Tensor
    slope_NH: Tensor | None
    expected_N: Tensor
    """Predicted gradient of each log-probability, from which the output layer's gradient was computed in the forward
    pass.
    """

    @classmethod
    def empty(cls, states_NH: Tensor, *, entropy: bool, slope: bool) -> "_Found":
        """Return zeros for all tokens, which are replaced as the results are computed.

        `entropy` and `slope` say whether the results include entropies and slopes.
        """
        logprobs_N, log_z_N, others_N, expected_N = states_NH.new_zeros((4, len(states_NH)), dtype=torch.float32)
        return cls(
            logprobs_N=logprobs_N,
            entropy_N=torch.zeros_like(logprobs_N) if entropy else None,
            log_z_N=log_z_N,
            others_N=others_N,
            slope_NH=torch.zeros_like(states_NH) if slope else None,
            expected_N=expected_N,
        )

    def put(self, rows_C: Tensor, scored: Scored) -> None:
        """Store the results of one pass for these rows."""
        for name in ("logprobs_N", "entropy_N", "log_z_N", "others_N", "slope_NH"):
            whole, part = getattr(self, name), getattr(scored, name)
            if whole is not None and part is not None:
                whole[rows_C] = part


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerGradient:
    """Gradient of the output layer's weight and bias, summed over the tokens added so far."""

    weight_VH: Tensor
    bias_V: Tensor | None

    @classmethod
    def zero(cls, layer: Layer, dtype: torch.dtype | None = None) -> "_LayerGradient":
        """Return a zero gradient, in the layer's data type or another one."""
        bias_V = None if layer.bias_V is None else torch.zeros_like(layer.bias_V, dtype=dtype)
        return cls(weight_VH=torch.zeros_like(layer.weight_VH, dtype=dtype), bias_V=bias_V)

    def add_kept(
        self, gradient_N: Tensor, states_NH: Tensor, targets_N: Tensor, layer: Layer, scored: Scored, kept: Kept
    ) -> None:
        """Add the tokens of one pass, using the logits that the pass stored in `kept`. The logits are overwritten."""
        rows_C = gradient_N.nonzero()[:, 0]
        some = len(rows_C) < len(gradient_N)
        push_N1, log_z_N1 = (gradient_N * layer.how.scale)[:, None], scored.log_z_N[:, None]
        hit_N1 = push_N1 * (scored.others_N * scored.bend_N)[:, None]
        if some:
            states_NH, targets_N, hit_N1 = states_NH[rows_C], targets_N[rows_C], hit_N1[rows_C]
        for start, e_NW, top_N1 in kept.tiles:
            factor_N1 = -push_N1 * (top_N1 - log_z_N1).exp()
            q_NW = e_NW[rows_C].mul_(factor_N1[rows_C]) if some else e_NW.mul_(factor_N1)
            put(q_NW, *column(targets_N, start, q_NW.shape[1]), hit_N1)
            add_product(self.weight_VH[start : start + q_NW.shape[1]], q_NW.to(states_NH.dtype).T, states_NH)
            if self.bias_V is not None:
                self.bias_V[start : start + q_NW.shape[1]] += q_NW.sum(0)

    def add(
        self,
        gradient_N: Tensor,
        states_NH: Tensor,
        targets_N: Tensor,
        layer: Layer,
        log_z_N: Tensor,
        others_N: Tensor,
    ) -> None:
        """Add these tokens, computing their logits a second time. Each tile of the gradient is written only once."""
        push_N1, room = (gradient_N * layer.how.scale)[:, None], Room(layer, len(gradient_N))
        for start, tile_WH in layer.tiles():
            sum_WH = torch.zeros_like(tile_WH, dtype=torch.float32)
            sum_W = sum_WH.new_zeros(len(tile_WH))
            for at in (slice(i, i + layer.rows) for i in range(0, len(gradient_N), layer.rows)):
                states = states_NH[at]
                z_NW = layer.logits(states, start, tile_WH, room.tile(len(states), len(tile_WH)))
                bend_NW = layer.how.bend(z_NW)
                q_NW = z_NW.sub_(log_z_N[at, None]).exp_().mul_(-push_N1[at])
                put(q_NW, *column(targets_N[at], start, len(tile_WH)), push_N1[at] * others_N[at, None])
                if bend_NW is not None:
                    q_NW *= bend_NW
                add_product(sum_WH, q_NW.to(states.dtype).T, states)
                sum_W += q_NW.sum(0)
            self.weight_VH[start : start + len(tile_WH)] += sum_WH
            if self.bias_V is not None:
                self.bias_V[start : start + len(tile_WH)] += sum_W


def _score(found: _Found, rows_N: Tensor, states_NH: Tensor, layer: Layer, targets_N: Tensor, *, slope: bool) -> None:
    """Store the log-probabilities of these rows in `found`, and with `slope` also their derivatives by the states."""
    rooms = Room(layer, len(rows_N)), Room(layer, len(rows_N))
    for rows_C in torch.split(rows_N, layer.rows):
        entropy = found.entropy_N is not None
        found.put(rows_C, scan(states_NH[rows_C], layer, targets_N[rows_C], rooms, entropy=entropy, slope=slope)[0])


def _score_and_add(
    found: _Found, rows_N: Tensor, states_NH: Tensor, layer: Layer, targets_N: Tensor, upstream: Upstream
) -> _LayerGradient:
    """Compute the results of these rows like `_score`, and return the output layer's gradient.

    The gradient is computed from the same logits, and from the log-probabilities' gradients that `upstream` predicts.
    """
    gradient, most = _LayerGradient.zero(layer, torch.float32), kept_rows(layer)
    keep = gradient.weight_VH.new_empty(min(most, len(rows_N)) * len(layer.weight_VH))
    room = Room(layer, min(most, len(rows_N)))
    for rows_C in torch.split(rows_N, most):
        states, targets = states_NH[rows_C], targets_N[rows_C]
        scored, kept = scan(
            states,
            layer,
            targets,
            (room, room),
            entropy=found.entropy_N is not None,
            slope=found.slope_NH is not None,
            keep=keep,
        )
        found.put(rows_C, scored)
        found.expected_N[rows_C] = expected_C = upstream(rows_C, scored.logprobs_N)
        gradient.add_kept(expected_C, states, targets, layer, scored, kept)
    return gradient


class _LinearLogprobs(torch.autograd.Function):
    """Computes `token_logprobs` under a plain linear output layer.

    Each product below is a matrix multiplication. The columns say whether it runs in the forward or the backward
    pass: for a frozen layer, for a trained layer whose upstream gradient is predicted, and for a trained layer
    without a prediction.

    ::

        product           of                          a frozen layer    a trained one, upstream known   not known
        logits            states, weight              forward           forward                         forward
        states' slope     probabilities, weight       forward           forward                         forward
        logits            states, weight                                                                backward
        weight's gradient probabilities, states                         forward                         backward
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        how: Scoring,
        entropy: bool,
        gradient: bool,
        upstream: Upstream | None,
    ) -> tuple[Tensor, Tensor | None]:
        layer = Layer(weight_VH=weight_VH, bias_V=bias_V, how=how)
        slope = gradient and ctx.needs_input_grad[0]
        trained = gradient and any(ctx.needs_input_grad[1:3])
        found = _Found.empty(states_NH, entropy=entropy, slope=slope)
        wanted_N = torch.ones_like(targets_N, dtype=torch.bool) if upstream is None else upstream.possible_N
        rows_N = wanted_N.nonzero()[:, 0]
        ctx.layer_gradient = None
        if trained and upstream is not None:
            ctx.layer_gradient = _score_and_add(found, rows_N, states_NH, layer, targets_N, upstream)
        else:
            _score(found, rows_N, states_NH, layer, targets_N, slope=slope)
        _score(found, (~wanted_N).nonzero()[:, 0], states_NH, layer, targets_N, slope=False)
        ctx.how, ctx.trained, ctx.expected_N = how, trained, found.expected_N
        ctx.unwanted = slope and len(rows_N) < len(wanted_N)
        needs = (states_NH, weight_VH, bias_V, targets_N, found.log_z_N, found.others_N, wanted_N)
        ctx.save_for_backward(found.slope_NH, *(needs if trained or ctx.unwanted else ()))
        if found.entropy_N is not None:
            ctx.mark_non_differentiable(found.entropy_N)
        return found.logprobs_N, found.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        slope_NH, *needs = ctx.saved_tensors
        states_grad_NH = weight_grad_VH = bias_grad_V = None
        if needs:
            states_NH, weight_VH, bias_V, targets_N, log_z_N, others_N, wanted_N = needs
            layer = Layer(weight_VH=weight_VH, bias_V=bias_V, how=ctx.how)
        if ctx.unwanted:
            missed_C = (~wanted_N & (grad_N != 0)).nonzero()[:, 0]
            found = _Found.empty(states_NH, entropy=False, slope=True)
            _score(found, missed_C, states_NH, layer, targets_N, slope=True)
            slope_NH = slope_NH + found.slope_NH
        if slope_NH is not None:
            states_grad_NH = (slope_NH * grad_N[:, None]).to(slope_NH.dtype)
        if ctx.trained:
            # Returned only once, because the receiver may add to it in place.
            gradient, ctx.layer_gradient = ctx.layer_gradient, None
            missing_N = grad_N if gradient is None else grad_N - ctx.expected_N
            gradient = _LayerGradient.zero(layer) if gradient is None else gradient
            rows_C = missing_N.nonzero()[:, 0]
            if len(rows_C):
                gradient.add(
                    missing_N[rows_C],
                    states_NH[rows_C],
                    targets_N[rows_C],
                    layer,
                    log_z_N[rows_C],
                    others_N[rows_C],
                )
            weight_grad_VH = gradient.weight_VH.to(weight_VH.dtype)
            bias_grad_V = None if gradient.bias_V is None else gradient.bias_V.to(bias_V.dtype)
        return states_grad_NH, weight_grad_VH, bias_grad_V, None, None, None, None, None
