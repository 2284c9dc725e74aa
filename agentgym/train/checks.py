"""Checks of the samples before a step: what the model cannot be given is refused by name."""

import logging
import zlib
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentgym.train.config import TrainConfig, peak_rate
from agentgym.train.policy.model import PolicyModel
from agentgym.types.arrays import Floats
from agentgym.types.sample import Sample, SampleKey

ABOVE_0 = 1e-3
"""Nats by which rounding in an engine may put the log-probability of a certain token above 0."""
_LOG = logging.getLogger("agentgym.train")
FULL_LR = 1e-4
"""Learning rate above which weights of a large model that are trained whole usually break."""
ADAPTER_LR = 1e-3
"""Learning rate above which an adapter beside a large model usually unlearns what the model knew."""
LARGE = 50_000_000
"""Number of weights from which on a model is large in this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The bounds of what a model can be given."""

    vocabulary: int
    """Number of ids: token ids are 0 to vocabulary - 1."""
    positions: int | None
    """Most tokens of a sample; None if the model names no limit."""

    @classmethod
    def of(cls, causal: Any) -> "ModelLimits":
        """Return the bounds of a transformers model."""
        layers = (causal.get_input_embeddings(), causal.get_output_embeddings())
        sizes = [layer.weight.shape[0] for layer in layers if hasattr(layer, "weight")]
        return cls(vocabulary=min(sizes), positions=_positions(causal.config.get_text_config()))

    def refuse(self, samples: Sequence[Sample]) -> None:
        """Raise ValueError for a sample that the model cannot be given, or that no engine can have made."""
        for sample in samples:
            named = f"samples: rollout {sample.rollout_id!r}, segment {sample.segment}, step {sample.step}"
            low = min(int(sample.prompt_ids.min()), int(sample.response_ids.min()))
            high = max(int(sample.prompt_ids.max()), int(sample.response_ids.max()))
            if low < 0 or high >= self.vocabulary:
                raise ValueError(
                    f"{named} has the token id {low if low < 0 else high}, and the model's ids are 0 to "
                    f"{self.vocabulary - 1}; sample with the tokenizer of the model that is trained"
                )
            if self.positions is not None and len(sample) > self.positions:
                raise ValueError(
                    f"{named} has {len(sample)} tokens, and the model's positions end at {self.positions} "
                    "(max_position_embeddings); lower the engine's context_tokens"
                )
            if not np.isfinite(np.where(sample.loss_mask, sample.logprobs, 0.0)).all():
                raise ValueError(
                    f"{named} has a log-probability that is not finite; give what the engine sampled each token with"
                )
            if not np.isfinite(np.where(sample.loss_mask, sample.advantages, 0.0)).all():
                raise ValueError(f"{named} has an advantage that is not finite; give each trained token a number")
            if (highest := float(np.where(sample.loss_mask, sample.logprobs, -1.0).max())) > ABOVE_0:
                raise ValueError(
                    f"{named} has the log-probability {highest:.4g} above 0; give logarithms of probabilities, in nats"
                )


class TrainedOnce:
    """The places of the groups that were trained on: none of them is trained on again, whoever hands it in twice."""

    def __init__(self) -> None:
        self._ranges: dict[str, list[list[int]]] = {}
        """By order of tasks: first place and the one behind the last, ascending. Groups come nearly in their order."""

    def refuse(self, samples: Sequence[Sample]) -> None:
        """Raise ValueError that names a group of a `SampleBatch` whose place was trained on before."""
        for (order, number), group in _places(samples).items():
            if self._has(order, number):
                raise ValueError(
                    f"samples: group {group!r}, place {number} in the order of tasks of {order}, was trained on "
                    "before; each rollout is trained on once. Resume from a checkpoint to train on a batch again, and "
                    "give a second schedule of one trainer a seed of its own"
                )

    def add(self, samples: Sequence[Sample]) -> None:
        """Note that the groups of a `SampleBatch` were trained on."""
        for order, number in sorted(_places(samples)):
            _join(self._ranges.setdefault(order, []), number)

    def state(self) -> dict[str, list[list[int]]]:
        """Return what `load` takes, as plain values."""
        return {order: [list(each) for each in ranges] for order, ranges in self._ranges.items()}

    def load(self, state: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Go on from the state of a checkpoint."""
        self._ranges = {order: [[int(first), int(end)] for first, end in ranges] for order, ranges in state.items()}

    def _has(self, order: str, number: int) -> bool:
        ranges = self._ranges.get(order, [])
        at = bisect([first for first, _ in ranges], number)
        return bool(at) and number < ranges[at - 1][1]


def _join(ranges: list[list[int]], number: int) -> None:
    """Take the number into the ranges, and join those that then touch."""
    at = bisect([first for first, _ in ranges], number)
    if at and ranges[at - 1][1] == number:
        ranges[at - 1][1] += 1
    else:
        ranges.insert(at, [number, number + 1])
        at += 1
    if at < len(ranges) and ranges[at][0] == ranges[at - 1][1]:
        ranges[at - 1][1] = ranges.pop(at)[1]


def _places(samples: Sequence[Sample]) -> Mapping[tuple[str, int], str]:
    """The ids of the groups by their places; none where the samples are no `SampleBatch` of a schedule."""
    return getattr(samples, "places", {})


def digest(samples: Sequence[Sample], returns: Mapping[SampleKey, Floats]) -> int:
    """Return a number that differs where any id, mask, log-probability, advantage, weight or return does."""
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
    """Return how many positions the model has, with those that a scaled rotation adds."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor = rope.get("factor")
    if not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * (rope.get("original_max_position_embeddings") or limit)))


def warn_of_settings(policy: PolicyModel, config: TrainConfig) -> None:
    """Log layers without an adapter, and a learning rate that a large model does not bear."""
    covered = policy.coverage
    if covered.bare and policy.adapted:
        _LOG.warning(
            "the adapter changes %.0f %% of the weights of the model's layers: %s; without one: %s",
            100 * covered.share,
            ", ".join(covered.adapted),
            ", ".join(covered.bare),
        )
    count = sum(weight.numel() for weight in policy.parameters())
    rate = peak_rate(config)
    if count <= LARGE:
        return
    if not policy.adapted and rate > FULL_LR:
        _LOG.warning(
            "train.lr is %g, the rate of an adapter; for weights that are trained whole set 1e-6 to 1e-5", rate
        )
    if policy.adapted and rate > ADAPTER_LR:
        _LOG.warning(
            "train.lr is %g, the rate of a tiny model; for an adapter beside a large one set 1e-5 to 5e-4", rate
        )
