"""The results of a training step that are stored with each rollout: trainer log-probabilities and advantages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentgym.types.arrays import Floats
from agentgym.types.rollout import Rollout, Segment
from agentgym.types.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step's training results for one segment of a rollout."""

    rollout_id: str
    segment: int
    logprobs: Floats | None
    """The trainer's log-probabilities of the segment's sampled tokens, before the optimizer step; None if they aren't
    known for all of these tokens.
    """
    advantages: Sequence[float]
    """One number per turn; empty if not all of the segment's sampled tokens were trained."""
    gap: float | None = None
    """Largest difference between these log-probabilities and the engine's, in nats. None if they aren't known, or if an
    earlier mini-batch of the same step had already changed the policy before they were computed.
    """


def trained_segments(
    rollouts: Sequence[Rollout], samples: Sequence[Sample], scored: Mapping[tuple[str, int, int], tuple[Floats, bool]]
) -> Iterator[Trained]:
    """Yield one `Trained` for each segment that the samples cover.

    A segment is covered by a single sample, or by one sample per turn::

        sampled tokens   a a a | a a | a        three turns
        logprobs         x x x   x x   x        those of the segment's samples, one after the other
        advantages       A       A     A        that of each turn's first token

    Args:
        rollouts: The rollouts that the samples were made from.
        samples: The samples of the training step.
        scored: By a sample's `rollout_id`, `segment` and `step`: the trainer's log-probabilities of the sample's
            trained tokens, and whether earlier optimizer steps of the same training step had changed the policy
            before these log-probabilities were computed.
    """
    rows: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        rows.setdefault((sample.rollout_id, sample.segment), []).append(sample)
    segments = {(rollout.rollout_id, segment.index): segment for rollout in rollouts for segment in rollout.segments}
    for key, parts in rows.items():
        parts.sort(key=lambda sample: sample.step)
        found = [scored.get((*key, sample.step)) for sample in parts]
        yield _trained(key[0], segments[key], parts, [part for part in found if part is not None])


def _trained(
    rollout_id: str, segment: Segment, parts: Sequence[Sample], scored: Sequence[tuple[Floats, bool]]
) -> Trained:
    lengths = [turn.stop - turn.start for turn in segment.turns]
    firsts = np.cumsum([0, *lengths[:-1]])
    advantages = np.concatenate([sample.advantages[sample.loss_mask] for sample in parts])
    logprobs = np.concatenate([of for of, _ in scored]) if len(scored) == len(parts) else None
    if logprobs is not None and len(logprobs) != sum(lengths):
        logprobs = None  # only some sampled tokens were trained, and a store can't tell which
    moved = any(changed for _, changed in scored)
    gap = None if logprobs is None or moved else np.abs(logprobs - segment.logprobs[segment.sampled]).max()
    return Trained(
        rollout_id=rollout_id,
        segment=segment.index,
        logprobs=logprobs,
        advantages=advantages[firsts].tolist() if len(advantages) == sum(lengths) else (),
        gap=None if gap is None else float(gap),
    )
