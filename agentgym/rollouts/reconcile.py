"""Comparison of a segment with the next prompt of its conversation, which may have been rendered differently.

Each letter is a token id: P in the segment's prompt, a and b in its last turn, x and c where the next prompt differs,
and e after the turn.

::

    held      P P P a b          the segment, whose last turn is a b
    CLEAN     P P P a b e e      the prompt extends it: continue
    REALIGN   P P P a c          a small difference inside the last turn: use the prompt's ids, untrained
    FORK      P x P a b          an earlier or larger difference: a new segment, whose prompt is not trained

Engine tokens are authoritative: sampled ids stay unchanged up to the first difference, and ids that were not sampled
are never trained.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from agentgym.rollouts.segment import OpenSegment

REALIGN_TOKENS = 8
"""Maximum number of sampled ids to give up at the end of a turn; beyond that, a new segment is better."""


class Drift(Enum):
    """How a prompt relates to a segment."""

    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


class Match(NamedTuple):
    """The relation, and the number of leading ids that segment and prompt have in common."""

    drift: Drift
    shared: int


def reconcile(segment: OpenSegment, prompt: Sequence[int], *, realign_tokens: int = REALIGN_TOKENS) -> Match:
    """Decide how this segment continues with the prompt, without changing the segment."""
    held = segment.token_ids
    shared = _shared(held, prompt)
    if shared == len(held):
        return Match(Drift.CLEAN, shared)
    inside = bool(segment.turns) and segment.turns[-1].start < shared < segment.turns[-1].stop
    if inside and segment.turns[-1].stop - shared <= realign_tokens:
        return Match(Drift.REALIGN, shared)
    return Match(Drift.FORK, shared)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(differs[0]) if len(differs) else n
