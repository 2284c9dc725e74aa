"""Checks of the samples before a training step. An error names the sample that the model can't use."""

import logging
import zlib
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentgym.causal_lm.model_defaults import LARGE, USUAL_RANK, USUAL_RATE, USUAL_TEMPERATURE
from agentgym.train.config import TrainConfig, peak_rate
from agentgym.train.policy.model import PolicyModel
from agentgym.types.arrays import Floats
from agentgym.types.sample import Sample, SampleKey

ABOVE_0 = 1e-3
"""How far, in nats, a log-probability may be above 0. An engine's rounding can cause this for a nearly certain
token.
"""
_LOG = logging.getLogger("agentgym.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Bounds on the samples that a model can process."""

    vocabulary: int
    """Number of token ids, which are 0 to vocabulary - 1."""
    positions: int | None
    """Maximum number of tokens in a sample; None if the model's config has no limit."""

    @classmethod
    def of(cls, causal: Any) -> "ModelLimits":
        """Return the bounds of a transformers model."""
        layers = (causal.get_input_embeddings(), causal.get_output_embeddings())
        sizes = [layer.weight.shape[0] for layer in layers if hasattr(layer, "weight")]
        return cls(vocabulary=min(sizes), positions=_positions(causal.config.get_text_config()))

    def refuse(self, samples: Sequence[Sample]) -> None:
        """Raise ValueError for a sample that the model can't process, or that no engine can have produced."""
        for sample in samples:
            named = f"samples: rollout {sample.rollout_id!r}, segment {sample.segment}, step {sample.step}"
            low = min(int(sample.prompt_ids.min()), int(sample.response_ids.min()))
            high = max(int(sample.prompt_ids.max()), int(sample.response_ids.max()))
            if low < 0 or high >= self.vocabulary:
                raise ValueError(
                    f"{named} has the token id {low if low < 0 else high}, but the model's ids are 0 to "
                    f"{self.vocabulary - 1}; sample with the tokenizer of the trained model"
                )
            if self.positions is not None and len(sample) > self.positions:
                raise ValueError(
                    f"{named} has {len(sample)} tokens, but the model has only {self.positions} positions "
                    "(max_position_embeddings); lower the engine's context_tokens"
                )
            if not np.isfinite(np.where(sample.loss_mask, sample.logprobs, 0.0)).all():
                raise ValueError(
                    f"{named} has a log-probability that is not finite; pass the engine's value for each sampled token"
                )
            if not np.isfinite(np.where(sample.loss_mask, sample.advantages, 0.0)).all():
                raise ValueError(f"{named} has an advantage that is not finite; pass a number for each trained token")
            if (highest := float(np.where(sample.loss_mask, sample.logprobs, -1.0).max())) > ABOVE_0:
                raise ValueError(
                    f"{named} has the log-probability {highest:.4g}, which is above 0; pass logarithms of "
                    "probabilities, in nats"
                )


class TrainedOnce:
    """Records the groups that were trained on, so that none is trained on twice.

    A group is identified by its task order and by its position in that order.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[list[int]]] = {}
        """For each task order, the positions that were trained on, as ascending ranges: pairs of the first position
        and the last one plus 1. Groups arrive nearly in order, so there are few ranges.
        """

    def refuse(self, samples: Sequence[Sample]) -> None:
        """Raise ValueError, naming the group, if a `SampleBatch` has a group that was trained on before."""
        for (order, number), group in _places(samples).items():
            if self._has(order, number):
                raise ValueError(
                    f"samples: group {group!r}, position {number} in the task order of {order}, was trained on before; "
                    "each rollout is trained on only once. To train on a batch again, resume from a checkpoint; to "
                    "train on two schedules of the same tasks, give each a different seed"
                )

    def add(self, samples: Sequence[Sample]) -> None:
        """Record that the groups of a `SampleBatch` were trained on."""
        for order, number in sorted(_places(samples)):
            _join(self._ranges.setdefault(order, []), number)

    def state(self) -> dict[str, list[list[int]]]:
        """Return the state as plain values, for `load`."""
        return {order: [list(each) for each in ranges] for order, ranges in self._ranges.items()}

    def load(self, state: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Restore the state of a checkpoint."""
        self._ranges = {order: [[int(first), int(end)] for first, end in ranges] for order, ranges in state.items()}

    def _has(self, order: str, number: int) -> bool:
        ranges = self._ranges.get(order, [])
        at = bisect([first for first, _ in ranges], number)
        return bool(at) and number < ranges[at - 1][1]


def _join(ranges: list[list[int]], number: int) -> None:
    """Add a position to the ranges of a task order (see `TrainedOnce`), and merge ranges that become adjacent."""
    at = bisect([first for first, _ in ranges], number)
    if at and ranges[at - 1][1] == number:
        ranges[at - 1][1] += 1
    else:
        ranges.insert(at, [number, number + 1])
        at += 1
    if at < len(ranges) and ranges[at][0] == ranges[at - 1][1]:
        ranges[at - 1][1] = ranges.pop(at)[1]


def _places(samples: Sequence[Sample]) -> Mapping[tuple[str, int], str]:
    """Return the ids of the groups by position, or {} if the samples aren't a `SampleBatch` of scheduled groups."""
    return getattr(samples, "places", {})


def digest(samples: Sequence[Sample], returns: Mapping[SampleKey, Floats]) -> int:
    """Return a checksum that changes with any id, mask, log-probability, advantage, weight or return."""
    digest = 0
    for sample in samples:
        name = f"{sample.rollout_id} {sample.segment} {sample.step} {len(sample.prompt_ids)} {sample.weight};"
        digest = zlib.crc32(name.encode(), digest)
        arrays = (sample.prompt_ids, sample.response_ids, sample.loss_mask, sample.logprobs, sample.advantages)
        for part in arrays:
            digest = zlib.crc32(np.ascontiguousarray(part).data, digest)
    for key, given in returns.items():
        digest = zlib.crc32(np.ascontiguousarray(given).data, zlib.crc32(repr(key).encode(), digest))
    return digest


def _positions(config: Any) -> int | None:
    """Return the model's number of positions, including those that RoPE scaling adds; None if it has no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor = rope.get("factor")
    if not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * (rope.get("original_max_position_embeddings") or limit)))


def warn_of_settings(policy: PolicyModel, config: TrainConfig) -> None:
    """Log a warning for layers without an adapter, and for each setting that is far outside a large model's range."""
    covered = policy.coverage
    if covered.bare and policy.adapted:
        _LOG.warning(
            "the adapter covers %.0f %% of the weights in the model's layers: %s; layers without an adapter: %s",
            100 * covered.share,
            ", ".join(covered.adapted),
            ", ".join(covered.bare),
        )
    if sum(weight.numel() for weight in policy.parameters()) <= LARGE:
        return
    usual = {"lr": USUAL_RATE[config.method], "temperature": USUAL_TEMPERATURE}
    usual |= {"lora_rank": USUAL_RANK} if policy.adapted else {}
    for name, found in usual.items():
        if found.is_far(value := peak_rate(config) if name == "lr" else getattr(config, name)):
            _LOG.warning(
                "train.%s is %g, which is far %s the usual range for a model of this size; set %s",
                *(name, value, "above" if value > found.high else "below", found.instead),
            )
