"""How a segment grows, closes, and how the next one opens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentgym.env import Compact
from agentgym.rollouts.chat import Chat
from agentgym.types import Completion, Message, Segment, SegmentKind, Turn


@dataclass(slots=True, kw_only=True)
class OpenSegment:
    """A segment that still grows: three lists of one length after every append."""

    index: int
    parent: int | None
    kind: SegmentKind
    chat: Chat
    context_tokens: int
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def room(self) -> int:
        """How many more ids the context takes."""
        return self.context_tokens - len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Append ids that were not sampled; False where they were cut at the end of the context."""
        kept = token_ids[: self.room]
        self.token_ids += kept
        self.sampled += [False] * len(kept)
        self.logprobs += [0.0] * len(kept)
        return len(kept) == len(token_ids)

    def append(self, completion: Completion, message: Message, *, seconds: float) -> None:
        """Append a sampled turn, ids and log-probabilities verbatim."""
        start = len(self.token_ids)
        # Counted before parsing: a malformed call was sampled too, and must be trained on.
        self.token_ids += completion.token_ids.tolist()
        self.sampled += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()
        turn = Turn(
            start=start,
            stop=len(self.token_ids),
            finish_reason=completion.finish_reason,
            versions=completion.versions,
            message=message,
            seconds=seconds,
        )
        self.turns.append(turn)

    def close(self) -> Segment:
        """The finished segment, laws checked."""
        return Segment(
            index=self.index,
            parent=self.parent,
            kind=self.kind,
            token_ids=np.array(self.token_ids, np.int64),
            sampled=np.array(self.sampled, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            turns=tuple(self.turns),
        )


def wants_compaction(policy: Compact | None, segment: OpenSegment) -> bool:
    """Whether the policy asks for a summary before the next turn."""
    if policy is None:
        return False
    full = policy.at is not None and len(segment.token_ids) >= policy.at * segment.context_tokens
    return full or (policy.turns is not None and len(segment.turns) >= policy.turns)


def compacted(first: Sequence[Message], summary: str) -> list[Message]:
    """What the next segment starts from: the first prompt, the summary behind its last user message."""
    *before, last = first
    if last["role"] != "user":
        return [*first, Message(role="user", content=summary)]
    return [*before, Message(role="user", content=f"{last['content']}\n{summary}")]
