"""Segments while they grow: their ids, their turns, and the messages of their conversation."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from agentgym.chat.message_chat import FILL
from agentgym.environments.limits import Compact, Window
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion
from agentgym.types.messages import Message
from agentgym.types.rollout import Segment, SegmentKind, Turn


class Speaker(NamedTuple):
    """Who samples the turns of a conversation, and what they are trained on."""

    role: str = ""
    """The role whose reward they are trained on; "" for the rollout's own."""
    model: str = ""
    """The model role that samples them; "" for the policy."""
    trained: bool = True
    """Whether they become samples."""


POLICY = Speaker()
"""The policy, trained on the rollout's reward."""


@dataclass(slots=True, kw_only=True)
class OpenSegment:
    """A segment that still grows: ids, and the turns among them.

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
    tools: Sequence[dict[str, Any]] = ()
    """The schemas of the tools that the model was shown."""
    token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    """The ids so far, eight bytes each; it is read by others as `shown`, and is not written to in place."""
    turns: list[Turn] = field(default_factory=list)
    scores: list[bytes] = field(default_factory=list)
    """The log-probabilities of the ids of each turn, four bytes each: copies, for an engine may reuse its own."""
    sampled_at: float = 0.0
    """When the last turn was appended, by `clock`."""
    clock: Callable[[], float] = time.monotonic
    """The clock of the event loop that plays it."""
    speaker: Speaker = POLICY
    turns_before: int = 0
    """The turns of the segment that a branch goes on from, which count for the context policy."""
    branch: int | None = None
    """The place of its branch among those of the rollout; None for the rollout itself."""

    @property
    def room(self) -> int:
        """How many more ids the context takes."""
        return self.context_tokens - len(self.token_ids)

    def shown(self) -> memoryview:
        """A read-only view of the ids as they are; it costs no copy, and the ids in it never change.

        While somebody keeps it, the next ids go to a copy: CPython does not let an array change that has a view.
        """
        return memoryview(self.token_ids).toreadonly()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append ids that were not sampled; what does not fit the context is cut."""
        room = self.context_tokens - len(self.token_ids)
        if len(token_ids) > room:
            token_ids = token_ids[: max(room, 0)]
        self._put(token_ids if type(token_ids) is array else id_array(token_ids))

    def _put(self, ids: "array[int]") -> None:
        try:
            self.token_ids += ids
        except BufferError:  # Somebody keeps a view of them, which stays as it is.
            self.token_ids = self.token_ids + ids

    def recount(self, tokens: int) -> None:
        """Hold this many ids before the next turn, which an engine has counted that gives none; turns stay whole."""
        sampled = self.turns[-1].stop if self.turns else 0
        self.token_ids = self.token_ids[: max(tokens, sampled)]
        self.token_ids += array("q", [FILL]) * (tokens - len(self.token_ids))

    def append(
        self,
        completion: Completion,
        ids: "array[int]",
        message: Message,
        *,
        seconds: float,
        number: int,
        waited: float = 0.0,
        asked_at: float = 0.0,
    ) -> None:
        """Append a sampled turn, ids and log-probabilities verbatim, as copies; `ids` are the completion's."""
        start, versions = len(self.token_ids), completion.versions
        self._put(ids)
        if self.turns and self.turns[-1].versions == versions:
            versions = self.turns[-1].versions  # One object for all turns: most have the same.
        turn = Turn(
            start=start,
            stop=len(self.token_ids),
            finish_reason=completion.finish_reason,
            versions=versions,
            message=message,
            seconds=seconds,
            waited=waited,
            asked_at=asked_at,
            number=number,
        )
        self.turns.append(turn)
        self.scores.append(completion.logprobs.tobytes())
        self.sampled_at = self.clock()

    def answer(self, messages: Sequence[Message], *, reward: float = 0.0) -> None:
        """Note what answered the last turn, how long that took, and what the env gave for the turn.

        Messages of several answers to one turn follow each other, and their rewards add up.
        """
        last = self.turns[-1]
        self.turns[-1] = last._replace(
            env_messages=(*last.env_messages, *messages),
            env_seconds=self.clock() - self.sampled_at,
            reward=last.reward + reward,
        )

    def set_answer(self, turn: int, messages: Sequence[Message]) -> None:
        """Note other messages behind a turn than the env answered with: those that its context went on with."""
        self.turns[turn] = self.turns[turn]._replace(env_messages=tuple(messages))

    def logprobs(self, turn: int) -> Floats:
        """The log-probabilities of the ids of a turn."""
        ids = self.turns[turn].stop - self.turns[turn].start
        return np.frombuffer(self.scores[turn], np.float32, ids)

    def realign(self, at: int, token_ids: Sequence[int]) -> None:
        """Take `token_ids` for what stands from `at` on; the last turn keeps what it sampled before.

        ::

            held     P  P  a  b        b was sampled, and the agent's next prompt says c
            prompt   P  P  a  c  e
            sampled  0  0  1  0  0

        What does not fit the context is cut.
        """
        last = self.turns[-1]
        versions = tuple(version for version in last.versions if version.start < at - last.start)
        self.turns[-1] = last._replace(stop=at, versions=versions)
        self.token_ids = self.token_ids[:at]
        self.extend(token_ids)

    def close(self) -> Segment:
        """The finished segment, laws checked."""
        ids = len(self.token_ids)
        sampled, logprobs = bytearray(ids), bytearray(4 * ids)
        for turn, scores in zip(self.turns, self.scores, strict=True):
            sampled[turn.start : turn.stop] = b"\1" * (turn.stop - turn.start)
            logprobs[4 * turn.start : 4 * turn.stop] = scores[: 4 * (turn.stop - turn.start)]
        # Bytes cannot change, so numpy makes read-only vectors of them without a copy.
        return Segment(
            index=self.index,
            parent=self.parent,
            kind=self.kind,
            token_ids=np.frombuffer(self.token_ids.tobytes(), np.int64),
            sampled=np.frombuffer(bytes(sampled), np.bool_),
            logprobs=np.frombuffer(bytes(logprobs), np.float32),
            turns=tuple(self.turns),
            prompt_messages=tuple(self.prompt_messages),
            tools=tuple(self.tools),
            role=self.speaker.role,
            model=self.speaker.model,
            trained=self.speaker.trained,
            branch=self.branch,
        )


def id_array(token_ids: Sequence[int]) -> "array[int]":
    """Return the ids as an array of eight bytes each; of `bytes` each byte is an id, as in any other sequence."""
    # A list first: an array takes bytes for its own memory.
    return array("q", token_ids if type(token_ids) is list else [*token_ids])


def is_due(policy: Compact | Window, segment: OpenSegment, held: int, reserve: int) -> bool:
    """Whether the policy cuts the context before the next turn, where the segment would hold `held` ids before it.

    Also where less than `reserve` would be left: past the context nothing could be cut any more.
    """
    full = policy.at is not None and held >= policy.at * segment.context_tokens
    full = full or held + reserve > segment.context_tokens
    return full or (policy.turns is not None and segment.turns_before + len(segment.turns) >= policy.turns)
