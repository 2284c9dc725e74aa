"""Growing segments: their ids, their turns, and the messages of their conversation."""

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
    """Who samples a conversation's turns, and which reward they are trained on."""

    role: str = ""
    """The role whose reward the turns are trained on; "" for the rollout's own."""
    model: str = ""
    """The model role that samples the turns; "" for the policy."""
    trained: bool = True
    """Whether the turns become training samples."""


POLICY = Speaker()
"""The policy, trained on the rollout's reward."""


@dataclass(slots=True, kw_only=True)
class OpenSegment:
    """A segment that still grows: ids, and the turns among them.

    Messages are stored as given, without a copy.
    """

    index: int
    parent: int | None
    kind: SegmentKind
    session: str
    """The name under which the engine caches its computations."""
    context_tokens: int
    prompt_messages: Sequence[Message] = ()
    """The messages that the segment starts with."""
    tools: Sequence[dict[str, Any]] = ()
    """The schemas of the tools in the prompt."""
    token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    """The ids so far, eight bytes each. Other code reads them through `shown`; no id is ever changed in place."""
    turns: list[Turn] = field(default_factory=list)
    scores: list[bytes] = field(default_factory=list)
    """The log-probabilities of each turn's ids, four bytes each, copied because an engine may reuse its arrays."""
    sampled_at: float = 0.0
    """When the last turn was appended, by `clock`."""
    clock: Callable[[], float] = time.monotonic
    """The clock of the event loop that runs the rollout."""
    speaker: Speaker = POLICY
    turns_before: int = 0
    """Number of turns before this segment that the context policy also counts.

    For a branch's first segment, they are the turns of the segment that it continues.
    """
    branch: int | None = None
    """Index of the segment's branch among the rollout's branches; None for the rollout itself."""

    @property
    def room(self) -> int:
        """Number of ids that still fit in the context."""
        return self.context_tokens - len(self.token_ids)

    def shown(self) -> memoryview:
        """Return a read-only view of the current ids; it needs no copy, and its ids never change.

        While such a view exists, new ids go into a copy, because CPython can't resize an array that has a view.
        """
        return memoryview(self.token_ids).toreadonly()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append ids that were not sampled, truncated to the number that still fits in the context."""
        room = self.context_tokens - len(self.token_ids)
        if len(token_ids) > room:
            token_ids = token_ids[: max(room, 0)]
        self._put(token_ids if type(token_ids) is array else id_array(token_ids))

    def _put(self, ids: "array[int]") -> None:
        try:
            self.token_ids += ids
        except BufferError:  # A view of the ids exists, and must not change.
            self.token_ids = self.token_ids + ids

    def recount(self, tokens: int) -> None:
        """Adjust the ids before the next turn to the number that an engine counted; sampled turns are never truncated.

        This is for engines that return no ids.
        """
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
        """Append a sampled turn, with a copy of its log-probabilities; `ids` are the token ids of `completion`.

        The other arguments become the turn's fields of the same name.
        """
        start, versions = len(self.token_ids), completion.versions
        self._put(ids)
        if self.turns and self.turns[-1].versions == versions:
            versions = self.turns[-1].versions  # Most turns have equal versions, so they share one object.
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
        """Record the answer to the last turn, its duration, and the env's reward for the turn.

        Several answers to one turn are concatenated, and their rewards are summed.
        """
        last = self.turns[-1]
        self.turns[-1] = last._replace(
            env_messages=(*last.env_messages, *messages),
            env_seconds=self.clock() - self.sampled_at,
            reward=last.reward + reward,
        )

    def set_answer(self, turn: int, messages: Sequence[Message]) -> None:
        """Replace the recorded answer to a turn with the messages that its context actually continued with."""
        self.turns[turn] = self.turns[turn]._replace(env_messages=tuple(messages))

    def logprobs(self, turn: int) -> Floats:
        """Return the log-probabilities of a turn's ids."""
        ids = self.turns[turn].stop - self.turns[turn].start
        return np.frombuffer(self.scores[turn], np.float32, ids)

    def realign(self, at: int, token_ids: Sequence[int]) -> None:
        """Replace everything from `at` on with `token_ids`; the last turn keeps the ids that it sampled before `at`.

        Each letter is a token id; the last line shows which ids still count as sampled::

            held     P  P  a  b        b was sampled, but the agent's next prompt has c
            prompt   P  P  a  c  e
            sampled  0  0  1  0  0

        Ids that don't fit the context are cut off.
        """
        last = self.turns[-1]
        versions = tuple(version for version in last.versions if version.start < at - last.start)
        self.turns[-1] = last._replace(stop=at, versions=versions)
        self.token_ids = self.token_ids[:at]
        self.extend(token_ids)

    def close(self) -> Segment:
        """Return the finished, validated segment."""
        ids = len(self.token_ids)
        sampled, logprobs = bytearray(ids), bytearray(4 * ids)
        for turn, scores in zip(self.turns, self.scores, strict=True):
            sampled[turn.start : turn.stop] = b"\1" * (turn.stop - turn.start)
            logprobs[4 * turn.start : 4 * turn.stop] = scores[: 4 * (turn.stop - turn.start)]
        # Bytes are immutable, so NumPy creates read-only vectors from them without a copy.
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
    """Return the ids as an array with eight bytes each; if they are given as `bytes`, each byte is one id."""
    # A list first, because an array would interpret bytes as its raw memory.
    return array("q", token_ids if type(token_ids) is list else [*token_ids])


def is_due(policy: Compact | Window, segment: OpenSegment, held: int, reserve: int) -> bool:
    """Return whether the context policy applies before the next turn, in which the segment would have `held` ids.

    It also applies if fewer than `reserve` ids would be left, because a summary wouldn't fit into a full context.
    """
    full = policy.at is not None and held >= policy.at * segment.context_tokens
    full = full or held + reserve > segment.context_tokens
    return full or (policy.turns is not None and segment.turns_before + len(segment.turns) >= policy.turns)
