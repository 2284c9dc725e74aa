"""Comparison of a segment with the next prompt of its conversation, which may have been rendered differently.

::

    held      P P P a b          the segment, its last turn a b
    CLEAN     P P P a b e e      the prompt extends it: go on
    REALIGN   P P P a c          it differs inside the last turn, and by little: take the prompt's ids, untrained
    FORK      P x P a b          it differs earlier, or by much: a new segment, with nothing of the prompt trained

Engine tokens are the only truth: what was sampled stays as it was up to where the prompt departs from it, and what was
not sampled is never trained.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from agentgym.rollouts.segment import OpenSegment

REALIGN_TOKENS = 8
"""Sampled ids that may be given up at the end of a turn before a new segment is the better choice."""


class Drift(Enum):
    """How a prompt relates to a segment."""

    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


class Match(NamedTuple):
    """The relation, and how many ids segment and prompt have in common."""

    drift: Drift
    shared: int


def reconcile(segment: OpenSegment, prompt: Sequence[int], *, realign_tokens: int = REALIGN_TOKENS) -> Match:
    """Decide how this segment goes on with the prompt; the segment is left as it is."""
    held = segment.token_ids
    shared = _shared(held, prompt)
    if shared == len(held):
        return Match(Drift.CLEAN, shared)
    inside = bool(segment.turns) and segment.turns[-1].start < shared < segment.turns[-1].stop
    if inside and segment.turns[-1].stop - shared <= realign_tokens:
        return Match(Drift.REALIGN, shared)
    return Match(Drift.FORK, shared)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(differs[0]) if len(differs) else n
