"""One line of conversation in a rollout: it samples, is answered, and opens its next segment when it must.

The root is a strand, and so is every fork and sub-agent; all of them write to one record and draw on its limits.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.env import Compact, Limits, Window, last_turns
from agentgym.errors import EngineError, EnvError, boundary
from agentgym.rollouts.chat import Chat
from agentgym.rollouts.context import OpenSegment, is_due
from agentgym.rollouts.engine import Engine
from agentgym.rollouts.reconcile import Drift, reconcile
from agentgym.types import Completion, Message, Sampling, SegmentKind, StopReason


@dataclass(slots=True, kw_only=True)
class Record:
    """What the strands of one rollout share: the engine, the limits, and an account of what was used."""

    name: str
    """Of the env, for errors."""
    rollout_id: str
    engine: Engine
    sampling: Sampling
    seed: int
    limits: Limits
    context: Compact | Window | None
    segments: list[OpenSegment] = field(default_factory=list)
    turns: int = 0
    """Turns of the policy so far, summaries not counted."""
    answers: int = 0
    """Turns and summaries so far."""
    tokens: int = 0
    """Sampled ids so far."""
    metrics: dict[str, float] = field(default_factory=dict)

    def budget(self, room: int) -> int:
        """The most ids that the next turn may sample into a context with this much room."""
        budget = min(self.limits.turn_tokens, room)
        if self.sampling.max_tokens is not None:
            budget = min(budget, self.sampling.max_tokens)
        if self.limits.tokens is not None:
            budget = min(budget, self.limits.tokens - self.tokens)
        return budget

    def out_of(self, room: int) -> StopReason | None:
        """Which limit lets no further id be sampled."""
        if room <= 0:
            return StopReason.CONTEXT
        if self.limits.tokens is not None and self.tokens >= self.limits.tokens:
            return StopReason.TOKENS
        return None

    def count(self, what: str) -> None:
        """One more of something, in the rollout's metrics."""
        self.metrics[what] = self.metrics.get(what, 0.0) + 1


class Strand:
    """A conversation and the segment it writes to; `name` is its place in the tree, "" for the root."""

    def __init__(
        self, record: Record, chat: Chat, first: Sequence[Message], name: str = "", turns: int | None = None
    ) -> None:
        self.record, self.chat, self.first, self.name = record, chat, list(first), name
        self.turns_left = turns
        self.opened = self.kids = 0
        self.reply: tuple[list[int], Message] | None = None
        """The last turn, while it is unanswered."""
        self.segment: OpenSegment

    def open(self, kind: SegmentKind, token_ids: Sequence[int], parent: int | None) -> None:
        """Begin a segment with ids that are not trained."""
        limits = self.record.limits
        self.segment = OpenSegment(
            index=len(self.record.segments),
            parent=parent,
            kind=kind,
            session=f"{self.record.rollout_id}/{self.name}{self.opened}",
            context_tokens=min(limits.context_tokens, self.record.engine.context_tokens),
        )
        self.opened += 1
        self.kids = 0
        self.segment.extend(token_ids)
        self.record.segments.append(self.segment)

    async def sample(self, *, counts: bool = True) -> Message | StopReason:
        """One turn into the open segment; StopReason where none could be finished."""
        record, segment = self.record, self.segment
        out = record.out_of(segment.room)
        if out is not None:
            return out
        start, budget = time.perf_counter(), record.budget(segment.room)
        with boundary(EngineError, "generate"):
            completion = await record.engine.generate(
                segment.token_ids,
                session=segment.session,
                max_tokens=budget,
                sampling=record.sampling,
                seed=self._seed(),
            )
            ids = _checked(completion, budget)
        message = self.chat.parse(ids, stopped=completion.finish_reason == "stop")
        # Whatever was parsed: a malformed call was sampled too, and must be trained on.
        segment.append(completion, ids, message, seconds=time.perf_counter() - start, number=record.answers)
        record.answers += 1
        record.turns += counts
        record.tokens += len(ids)
        if self.turns_left is not None:
            self.turns_left -= counts
        if completion.finish_reason == "length":
            return record.out_of(segment.room) or StopReason.LENGTH
        self.reply = (ids, message)
        return message

    def out_of_turns(self) -> bool:
        """Whether the rollout, or this strand of it, has had all its turns."""
        return self.record.turns >= self.record.limits.turns or self.turns_left == 0

    async def answer(self, new: Sequence[Message]) -> StopReason | None:
        """Go on from the last turn with its answer; StopReason where no further turn can be sampled."""
        policy = self.record.context
        if policy is None or not is_due(policy, self.segment):
            return self.extend(new)
        if isinstance(policy, Window):
            return self._slide(policy, new)
        return await self._compact(policy, new)

    def extend(self, new: Sequence[Message]) -> StopReason | None:
        """Append what the template puts behind the turn, in this segment or, if it rewrote that, in a new one."""
        delta = self._move(new)
        if delta is None:
            return self._rerender()
        return None if self.segment.extend(delta) else StopReason.CONTEXT

    def carried(self, new: Sequence[Message]) -> tuple[Chat, list[int]]:
        """This conversation as if it had been answered with `new`: for a fork, which leaves it as it is."""
        chat = self.chat.branch()
        if self.reply is None:
            chat = Chat(chat.tokenizer, chat.tools, [*chat.messages, *new])
            return chat, chat.prompt_ids()
        with boundary(EnvError, f"{self.record.name}: the messages of fork"):
            delta = chat.extend(*self.reply, new)
        return chat, chat.prompt_ids() if delta is None else [*self.segment.token_ids, *delta]

    def _move(self, new: Sequence[Message]) -> list[int] | None:
        assert self.reply is not None
        reply, self.reply = self.reply, None
        with boundary(EnvError, f"{self.record.name}: the messages of step"):
            return self.chat.extend(*reply, new, room=self.segment.room)

    def _rerender(self) -> StopReason | None:
        """The template tells the conversation anew: keep of the segment what still holds."""
        prompt, segment = self.chat.prompt_ids(), self.segment
        match = reconcile(segment, prompt)
        if match.drift is Drift.FORK:
            self.record.count("rerenders")
            self.open("rerender", prompt, segment.index)
        elif match.drift is Drift.REALIGN:
            self.record.count("realigned")
            segment.realign(match.shared, prompt[match.shared :])
        else:
            segment.extend(prompt[match.shared :])
        return StopReason.CONTEXT if self.segment.room <= 0 else None

    async def _compact(self, policy: Compact, new: Sequence[Message]) -> StopReason | None:
        """Let the model summarise, then go on from what the policy keeps."""
        ended = self.extend([*new, Message(role="user", content=policy.instruction)])
        if ended is not None:
            return ended
        since = self.chat.messages[len(self.first) : -1]
        summary = await self.sample(counts=False)
        if isinstance(summary, StopReason):
            return summary
        with boundary(EnvError, f"{self.record.name}: keep"):
            kept = policy.keep(self.first, since, summary["content"])
        self.record.count("compactions")
        self._restart("compaction", kept)
        return None

    def _slide(self, policy: Window, new: Sequence[Message]) -> StopReason | None:
        self._move(new)
        kept = [*self.first, *last_turns(self.chat.messages[len(self.first) :], policy.keep)]
        self.record.count("slides")
        self._restart("rerender", kept)
        return StopReason.CONTEXT if self.segment.room <= 0 else None

    def _restart(self, kind: SegmentKind, messages: Sequence[Message]) -> None:
        self.reply = None
        self.chat = Chat(self.chat.tokenizer, self.chat.tools, messages)
        with boundary(EnvError, f"{self.record.name}: the messages kept"):
            prompt = self.chat.prompt_ids()
        self.open(kind, prompt, self.segment.index)

    def _seed(self) -> int:
        """A seed of this turn alone, so that its draws do not depend on any other turn or rollout."""
        name = f"{self.record.seed}/{self.segment.session}/{len(self.segment.turns)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def _checked(completion: Completion, budget: int) -> list[int]:
    """The sampled ids; EngineError where the turn was aborted or is longer than was asked for."""
    if completion.finish_reason == "abort":
        raise EngineError("the engine aborted the turn")
    if len(completion.token_ids) > budget:
        raise EngineError(f"the engine sampled {len(completion.token_ids)} ids where {budget} were asked for")
    ids: list[Any] = completion.token_ids.tolist()
    return ids
