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

from agentgym.messages import Message
from agentgym.rollouts.segment import OpenSegment
from agentgym.types import Completion, Segment

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
    if one[:n] == other[:n]:
        return n
    return int((np.asarray(one[:n]) != np.asarray(other[:n])).argmax())


class PromptSegments:
    """Segments of an agent that sends its whole prompt each time, as one behind an OpenAI endpoint does.

    Every sampled id is in one segment, where it is trained once. Prompts of several conversations may alternate, as
    those of sub-agents do: each goes on in the segment that it fits best.
    """

    def __init__(self, *, context_tokens: int, realign_tokens: int = REALIGN_TOKENS) -> None:
        self.context_tokens, self.realign_tokens = context_tokens, realign_tokens
        self.segments: list[OpenSegment] = []
        self.counts = dict.fromkeys(Drift, 0)
        self._number = 0

    def add(self, prompt: Sequence[int], completion: Completion, message: Message, *, seconds: float = 0.0) -> None:
        """Append one request: the prompt's ids as the engine read them, and what it answered."""
        if len(prompt) + len(completion.token_ids) > self.context_tokens:
            raise ValueError(f"prompt: {len(prompt)} ids and an answer do not fit {self.context_tokens} context_tokens")
        segment = self._segment(list(prompt))
        if len(completion.token_ids):
            segment.append(completion, completion.token_ids.tolist(), message, seconds=seconds, number=self._number)
            self._number += 1

    def close(self) -> tuple[Segment, ...]:
        """The finished segments, laws checked."""
        return tuple(segment.close() for segment in self.segments)

    def _segment(self, prompt: list[int]) -> OpenSegment:
        """The segment that this prompt goes on in; it ends with the prompt."""
        matches = [(reconcile(s, prompt, realign_tokens=self.realign_tokens), s) for s in self.segments]
        order = (Drift.FORK, Drift.REALIGN, Drift.CLEAN)
        match, segment = max(matches, key=lambda m: (order.index(m[0].drift), m[0].shared), default=(None, None))
        if match is None or segment is None:
            return self._open(prompt, None)
        self.counts[match.drift] += 1
        if match.drift is Drift.FORK:
            return self._open(prompt, segment.index)
        if match.drift is Drift.REALIGN:
            segment.realign(match.shared, prompt[match.shared :])
        else:
            segment.extend(prompt[match.shared :])
        return segment

    def _open(self, prompt: list[int], parent: int | None) -> OpenSegment:
        index = len(self.segments)
        segment = OpenSegment(
            index=index,
            parent=parent,
            kind="root" if parent is None else "rerender",
            session=str(index),
            context_tokens=self.context_tokens,
            token_ids=prompt,
        )
        self.segments.append(segment)
        return segment
