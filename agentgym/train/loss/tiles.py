"""One pass over the vocabulary of a linear output layer, tile by tile.

A tile is the logits of some of the tokens for some of the vocabulary's ids. In the names of tensors, N stands for the
tokens, V for the vocabulary's ids, H for the hidden size and W for the ids in one tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.train.loss.scoring import Scoring

LOWEST = -1e30
"""A number below any logit, but finite, so that differences aren't NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear output layer and the map of its logits."""

    weight_VH: Tensor
    bias_V: Tensor | None
    how: Scoring

    @property
    def rows(self) -> int:
        """Maximum number of tokens whose logits are computed in one multiplication."""
        return _tile(self.weight_VH)[0]

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Yield slices of the weight, each preceded by the index of its first row in the whole weight."""
        width = _tile(self.weight_VH)[1]
        for start in range(0, len(self.weight_VH), width):
            yield start, self.weight_VH[start : start + width]

    def logits(self, states_NH: Tensor, start: int, tile_WH: Tensor, out: Tensor) -> Tensor:
        """Write the tokens' mapped logits for one slice of the weight to `out` (float32, N x W), and return it."""
        product(states_NH, tile_WH.T, out)
        if self.bias_V is not None:
            out += self.bias_V[start : start + len(tile_WH)]
        return self.how.in_place(out)


def _tile(weight: Tensor) -> tuple[int, int]:
    """Return how many tokens and vocabulary rows are multiplied at once: the fewest that run at full speed."""
    return (512, 1024) if weight.device.type == "cpu" else (2048, 8192)


class Room:
    """Memory that all tiles reuse.

    Allocating fresh pages for each tile would take a fifth of the time of a multiplication.
    """

    def __init__(self, layer: Layer, tokens: int) -> None:
        width = min(_tile(layer.weight_VH)[1], len(layer.weight_VH))
        self._flat = layer.weight_VH.new_empty(min(tokens, layer.rows) * width, dtype=torch.float32)

    def tile(self, tokens: int, width: int) -> Tensor:
        """Return a contiguous float32 tile, which overwrites the previous one."""
        return self._flat[: tokens * width].view(tokens, width)


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Write left @ right to `out` in float32. The factors may be rounded to bfloat16, but the sums never are."""
    if _is_mixed(left, right):
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)


def add_product(sum_: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a float32 sum, with the same rounding as in `product`."""
    if _is_mixed(left, right):
        sum_ += torch.mm(left, right, out_dtype=torch.float32)
    else:
        torch.addmm(sum_, left.float(), right.float(), out=sum_)


def _is_mixed(left: Tensor, right: Tensor) -> bool:
    """Return whether the device multiplies these factors without a cast, and sums them in float32."""
    return left.is_cuda and left.dtype == right.dtype != torch.float32


def column(targets_N: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return each target's column in the tile that begins at id `start` (N x 1), and whether it is inside the tile.

    A column outside the tile is replaced with the tile's nearest column.
    """
    column_N1 = (targets_N - start)[:, None]
    return column_N1.clamp(0, width - 1), (column_N1 >= 0) & (column_N1 < width)


def put(tile_NW: Tensor, column_N1: Tensor, inside_N1: Tensor, values_N1: Tensor) -> None:
    """Write each token's value to the token's column, but only if the column is inside the tile."""
    tile_NW.scatter_(1, column_N1, torch.where(inside_N1, values_N1, tile_NW.gather(1, column_N1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Results of one pass over the vocabulary, for each token."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    log_z_N: Tensor
    """Logarithm of the sum of exp(logit / temperature)."""
    others_N: Tensor
    """Probability of all ids except the target. It is computed directly, because 1 - p would round to 0 if p is near
    1.
    """
    bend_N: Tensor
    """Factor by which the cap reduces the derivative at the target's logit."""
    slope_NH: Tensor | None
    """Derivative of the log-probability with respect to the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Intermediate results of a pass, one tile at a time, so that the same logits can be used again."""

    tiles: list[tuple[int, Tensor, Tensor]]
    """Three values for each tile: the index of its first row in the weight; e (N x W); and top (N x 1). top is the
    token's largest logit so far, and e is exp(logit - top), times the factor of the cap, with 0 at the target.
    """


def scan(
    states_NH: Tensor,
    layer: Layer,
    targets_N: Tensor,
    rooms: tuple[Room, Room],
    *,
    entropy: bool,
    slope: bool,
    keep: Tensor | None = None,
) -> tuple[Scored, Kept]:
    """Pass over the vocabulary once, subtracting from each logit the largest one so far (arXiv 1805.02867).

    With z the logits over the temperature, p their softmax, t the target and h the hidden state::

        log p_t           z_t - log sum_v exp z_v
        d log p_t / d h   (W_t - sum_v p_v W_v) / temperature = ((1 - p_t) W_t - sum_{v != t} p_v W_v) / temperature

    Under a soft cap, each W_v is multiplied by the slope of the cap at its logit. `keep` is flat memory for N x V
    numbers, to which the tiles of the second result (`Kept`) are written. Without it, the second result is empty, and
    both `rooms` are used as memory for tiles.
    """
    tokens, kept = len(states_NH), Kept(tiles=[])
    top_N1 = states_NH.new_full((tokens, 1), LOWEST, dtype=torch.float32)
    target_N1 = torch.zeros_like(top_N1)
    others_N1, energy_N1 = (torch.zeros_like(top_N1, dtype=torch.float64) for _ in range(2))  # sums over many tiles
    bend_N1 = torch.ones_like(top_N1)
    pull_NH = torch.zeros_like(states_NH, dtype=torch.float32) if slope else None
    for start, tile_WH in layer.tiles():
        width = len(tile_WH)
        z_NW = layer.logits(states_NH, start, tile_WH, rooms[0].tile(tokens, width))
        if keep is None:
            e_NW = rooms[1].tile(tokens, width)
        else:
            e_NW = keep[tokens * start : tokens * (start + width)].view(tokens, width)
        column_N1, inside_N1 = column(targets_N, start, width)
        target_N1 = torch.where(inside_N1, z_NW.gather(1, column_N1), target_N1)
        before_N1, top_N1 = top_N1, torch.maximum(top_N1, z_NW.amax(-1, keepdim=True))
        shrink_N1 = (before_N1 - top_N1).exp_()
        bend_NW = layer.how.bend(z_NW) if slope or keep is not None else None
        if bend_NW is not None:
            bend_N1 = torch.where(inside_N1, bend_NW.gather(1, column_N1), bend_N1)
        torch.exp(z_NW.sub_(top_N1), out=e_NW)
        put(e_NW, column_N1, inside_N1, torch.zeros_like(target_N1))
        if entropy:  # the sum of e (z - top), moved from the previous top to this one
            energy_N1 = (energy_N1 + others_N1 * (before_N1 - top_N1)) * shrink_N1
            energy_N1 += z_NW.mul_(e_NW).sum(-1, keepdim=True)
        others_N1 = others_N1 * shrink_N1 + e_NW.sum(-1, keepdim=True)
        if bend_NW is not None:
            e_NW *= bend_NW
        if pull_NH is not None:
            add_product(pull_NH.mul_(shrink_N1), e_NW.to(tile_WH.dtype), tile_WH)
        if keep is not None:
            kept.tiles.append((start, e_NW, top_N1))
    below_N1 = target_N1 - top_N1
    total_N1 = others_N1 + below_N1.exp()
    log_total_N1 = total_N1.log()
    others_N1 = others_N1 / total_N1
    if pull_NH is not None:
        pull_NH.div_(-total_N1).addcmul_((others_N1 * bend_N1).float(), layer.weight_VH[targets_N].float()).mul_(
            layer.how.scale
        )
    energy_N1 = (energy_N1 + below_N1.exp() * below_N1) / total_N1
    scored = Scored(
        logprobs_N=(below_N1 - log_total_N1).float()[:, 0],
        entropy_N=(log_total_N1 - energy_N1).float()[:, 0] if entropy else None,
        log_z_N=(top_N1 + log_total_N1).float()[:, 0],
        others_N=others_N1.float()[:, 0],
        bend_N=bend_N1[:, 0],
        slope_NH=None if pull_NH is None else pull_NH.to(states_NH.dtype),
    )
    return scored, kept
