"""Segments while they grow: their ids, their turns, and the messages of their conversation."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agentgym.environments.context_policies import Compact, Window
from agentgym.messages import Message
from agentgym.types import Completion, Floats, Segment, SegmentKind, Turn


@dataclass(slots=True, kw_only=True)
class OpenSegment:
    """A segment that still grows: ids, the turns among them, and each turn's log-probabilities.

    Messages are kept as they were given, not copied.
    """

    index: int
    parent: int | None
    kind: SegmentKind
    session: str
    """The name under which the engine keeps what it computed."""
    context_tokens: int
    prompt_messages: Sequence[Message] = ()
    """The messages that the segment opened with."""
    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)
    """The log-probabilities of each turn, as many as its ids."""
    _sampled_at: float = 0.0
    """When the last turn was appended, by `time.perf_counter`."""

    @property
    def room(self) -> int:
        """How many more ids the context takes."""
        return self.context_tokens - len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Append ids that were not sampled; False where they were cut at the end of the context."""
        kept = token_ids[: max(self.room, 0)]
        self.token_ids += kept
        return len(kept) == len(token_ids)

    def append(self, completion: Completion, ids: list[int], message: Message, *, seconds: float, number: int) -> None:
        """Append a sampled turn, ids and log-probabilities verbatim; `ids` are the completion's, as a list."""
        start = len(self.token_ids)
        self.token_ids += ids
        self.logprobs.append(completion.logprobs)
        turn = Turn(
            start=start,
            stop=len(self.token_ids),
            finish_reason=completion.finish_reason,
            versions=completion.versions,
            message=message,
            seconds=seconds,
            number=number,
        )
        self.turns.append(turn)
        self._sampled_at = time.perf_counter()

    def answer(self, messages: Sequence[Message], *, reward: float = 0.0) -> None:
        """Note what answered the last turn, how long that took, and what the env gave for the turn.

        Messages of several answers to one turn follow each other, and their rewards add up.
        """
        last = self.turns[-1]
        self.turns[-1] = replace(
            last,
            env_messages=(*last.env_messages, *messages),
            env_seconds=time.perf_counter() - self._sampled_at,
            reward=last.reward + reward,
        )

    def set_answer(self, turn: int, messages: Sequence[Message]) -> None:
        """Note other messages behind a turn than the env answered with: those that its context went on with."""
        self.turns[turn] = replace(self.turns[turn], env_messages=tuple(messages))

    def realign(self, at: int, token_ids: Sequence[int]) -> bool:
        """Take `token_ids` for what stands from `at` on; the last turn keeps what it sampled before.

        ::

            held     P  P  a  b        b was sampled, and the agent's next prompt says c
            prompt   P  P  a  c  e
            sampled  0  0  1  0  0

        False where they were cut at the end of the context.
        """
        last = self.turns[-1]
        kept = at - last.start
        versions = tuple(version for version in last.versions if version.start < kept)
        self.turns[-1] = replace(last, stop=at, versions=versions)
        self.logprobs[-1] = self.logprobs[-1][:kept]
        del self.token_ids[at:]
        return self.extend(token_ids)

    def close(self) -> Segment:
        """The finished segment, laws checked."""
        sampled = np.zeros(len(self.token_ids), np.bool_)
        logprobs = np.zeros(len(self.token_ids), np.float32)
        for turn, scores in zip(self.turns, self.logprobs, strict=True):
            sampled[turn.start : turn.stop] = True
            logprobs[turn.start : turn.stop] = scores
        return Segment(
            index=self.index,
            parent=self.parent,
            kind=self.kind,
            # array() reads a list of numbers in half the time of numpy
            token_ids=np.frombuffer(array("q", self.token_ids), np.int64),
            sampled=sampled,
            logprobs=logprobs,
            turns=tuple(self.turns),
            prompt_messages=tuple(self.prompt_messages),
        )


def is_due(policy: Compact | Window, segment: OpenSegment, held: int, reserve: int) -> bool:
    """Whether the policy cuts the context before the next turn, where the segment would hold `held` ids before it.

    Also where less than `reserve` would be left: past the context nothing could be cut any more.
    """
    full = policy.at is not None and held >= policy.at * segment.context_tokens
    full = full or held + reserve > segment.context_tokens
    return full or (policy.turns is not None and len(segment.turns) >= policy.turns)
