"""Conversations: turns that are sampled and answered, in one segment after another.

The root is a conversation, and so is every fork and sub-agent; all conversations of a rollout share a RolloutState.
"""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from agentgym.chat.chat import Chat
from agentgym.chat.message_chat import MessageChat
from agentgym.chat.tools_in_prompt import calls_as_text
from agentgym.engines.messages import AnyChat, MessageEngine, Usage, counted, open_chat
from agentgym.environments.env import Env
from agentgym.environments.limits import Compact, Window, last_turns
from agentgym.errors import ContextOverflow, EngineError, EnvError, boundary
from agentgym.machine.time_limits import count_held_time
from agentgym.rollouts.call_ids import CallIds
from agentgym.rollouts.reconcile import Drift, reconcile
from agentgym.rollouts.rollout_state import RolloutState
from agentgym.rollouts.segment import POLICY, OpenSegment, Speaker, id_array, is_due
from agentgym.rollouts.step_result import read_messages
from agentgym.seeds import seed_for
from agentgym.types.completion import Completion, Sampling
from agentgym.types.messages import Message
from agentgym.types.rollout import SegmentKind, StopReason

SUMMARY_SHARE = 0.1
"""Fraction of the context that is reserved for the next summary; less if one turn may not sample that many ids."""


_Sampled: TypeAlias = tuple[Completion, "array[int]", Message]
"""The result of an engine call: the completion, its ids and its message."""


class Reply(NamedTuple):
    """A turn that the env has not answered yet."""

    ids: "array[int]"
    message: Message
    stopped: bool
    """Whether its last id is a stop token."""


class Conversation:
    """A conversation and the segment it writes to; `name` is its path among the forks, "" for the root."""

    def __init__(
        self,
        state: RolloutState,
        chat: AnyChat,
        first: Sequence[Message],
        call_ids: CallIds,
        name: str = "",
        turns: int | None = None,
        speaker: Speaker = POLICY,
    ) -> None:
        self.state, self.chat, self.first, self.name = state, chat, list(first), name
        self.speaker, self.engine = speaker, state.engine_of(speaker.model)
        self.turns_left = turns
        self.call_ids = call_ids
        self.opened = self.forks = 0
        self.reply: Reply | None = None
        """The last turn, as long as it is unanswered."""
        self.cut: Message | None = None
        """The last turn, without its tool calls, if a token limit cut it off."""
        self.segment: OpenSegment

    def open(
        self, kind: SegmentKind, messages: Sequence[Message], token_ids: Sequence[int], parent: int | None
    ) -> None:
        """Open a segment with messages and their ids, which are not trained.

        Args:
            kind: Why the segment is opened, such as "fork".
            messages: The messages that it starts with.
            token_ids: Their ids.
            parent: Index of the segment that it continues; None for the root.
        """
        limits = self.state.limits
        self.segment = OpenSegment(
            index=len(self.state.segments),
            parent=parent,
            kind=kind,
            session=f"{self.state.rollout_id}/{self.name}{self.opened}",
            context_tokens=min(limits.context_tokens, self.engine.context_tokens),
            prompt_messages=messages,
            tools=self.chat.tools,
            speaker=self.speaker,
            clock=asyncio.get_running_loop().time,
        )
        self.opened += 1
        self.forks = 0
        self.segment.extend(token_ids)
        self.state.segments.append(self.segment)

    async def query(
        self, *, counts: bool = True, max_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Message | StopReason:
        """Sample one turn into the open segment.

        A turn counts as soon as it is requested. Therefore, the conversations of a rollout can't exceed the limits
        together, even if they are concurrent. A turn that is cancelled or fails doesn't count.

        Args:
            counts: Whether the turn counts toward the limits of turns.
            max_tokens: Limit for this turn only, in addition to the other limits.
            sampling: Sampling settings that replace the rollout's own.

        Returns:
            The message, or the StopReason if no turn could be finished.
        """
        state, segment, chat = self.state, self.segment, self.chat
        room, self.cut = segment.room, None
        out = state.out_of(room)
        if out is not None:
            return out
        self._count(counts)
        loop, sampled = asyncio.get_running_loop(), False
        start = loop.time()
        try:
            budget = state.budget(room if max_tokens is None else min(room, max_tokens))
            if state.limits.tokens is not None:
                budget = await state.take(budget)
            if not budget:
                return StopReason.TOKENS
            held = count_held_time()
            ask = self._reply(chat, budget) if isinstance(chat, MessageChat) else self._generate(chat, budget, sampling)
            completion, ids, message = await ask
            message = self.call_ids.named(message)
            sampled = True
        finally:
            if not sampled:
                self._count(-counts)
        # Independent of the parsed message, since malformed calls were also sampled and must be trained on.
        segment.append(
            completion,
            ids,
            message,
            seconds=loop.time() - start,
            number=state.answers,
            waited=held.seconds,
            asked_at=start - state.began,
        )
        state.answers += 1
        if completion.finish_reason == "length":
            state.count("cut_turns")
            self.cut = message.copy()
            self.cut.pop("tool_calls", None)
            return state.out_of(segment.room) or StopReason.LENGTH
        self.reply = Reply(ids, message, completion.finish_reason == "stop")
        return message

    def _count(self, turns: int) -> None:
        self.state.turns += turns
        if self.turns_left is not None:
            self.turns_left -= turns

    async def _generate(self, chat: Chat, budget: int, sampling: Sampling | None) -> _Sampled:
        """Request a turn from an engine that takes token ids."""
        state, segment, used = self.state, self.segment, 0
        try:
            completion = await self.engine.generate(
                segment.shown(),
                session=segment.session,
                max_tokens=budget,
                sampling=sampling or state.sampling,
                seed=self._seed(),
            )
            ids = _ids_of(completion, budget)
            used = len(ids)
        except BaseException as error:
            _GENERATE.cross(error)
            raise
        finally:
            state.give_back(budget, used)
        return completion, ids, chat.parse(ids, stopped=completion.finish_reason == "stop")

    async def _reply(self, chat: MessageChat, budget: int) -> _Sampled:
        """Request a turn from an engine that takes messages; the segment then has as many ids as the engine counted."""
        state, segment, used = self.state, self.segment, 0
        assert isinstance(self.engine, MessageEngine)
        try:
            with boundary(EngineError, "generate_message"):
                reply = await self.engine.generate_message(
                    chat.messages,
                    chat.tools,
                    session=segment.session,
                    max_tokens=budget,
                    sampling=state.sampling,
                    seed=self._seed(),
                )
            used = reply.usage.completion_tokens
        except EngineError as error:
            self._count_usage(Usage(sent_again=error.sent_again))
            raise
        finally:
            state.give_back(budget, used)
        self._count_usage(reply.usage)
        if reply.usage.prompt_tokens:
            segment.recount(reply.usage.prompt_tokens)
        completion = counted(reply)
        return completion, array("q", completion.token_ids.tobytes()), reply.message

    def _count_usage(self, usage: Usage) -> None:
        for name, value in usage.metrics(self.speaker.model).items():
            self.state.metrics[name] = self.state.metrics.get(name, 0.0) + value

    def out_of_turns(self) -> bool:
        """Return whether the rollout or this conversation has used all its turns."""
        return self.state.turns >= self.state.limits.turns or self.turns_left == 0

    async def answer(self, new: Sequence[Message]) -> StopReason | None:
        """Continue the conversation with the answer to its last turn; if a compaction or a slide is due, do it now.

        If the answer doesn't fit the context, it is truncated, and the next `query` returns the stop reason.

        Returns:
            None, or the StopReason if a summary could not be finished.
        """
        policy = self.state.context
        if policy is None:
            self._append(self._move(new, "the messages of step"))
            return None
        chat, reply = self.chat.branch(), self.reply
        delta = self._move(new, "the messages of step")
        if not is_due(policy, self.segment, self._length(delta), self._summary_room):
            self._append(delta)
        elif isinstance(policy, Window):
            self._slide(policy, delta)
        else:
            self.chat, self.reply = chat, reply
            return await self._compact(policy, new)
        return None

    def _append(self, delta: Sequence[int] | None) -> None:
        """Append the ids after the last turn to this segment.

        Args:
            delta: The ids; None if the template rewrote earlier text, and the conversation must be rendered again
                (`rerender`).
        """
        if delta is None:
            self.rerender()
        else:
            self.segment.extend(delta)

    def _length(self, delta: Sequence[int] | None) -> int:
        """Return the number of ids in the context once `delta`, the ids after the last turn, are appended.

        If `delta` is None because the template rewrote earlier text, the whole conversation is encoded and counted.
        """
        return len(self.chat.prompt_ids()) if delta is None else len(self.segment.token_ids) + len(delta)

    @property
    def _summary_room(self) -> int:
        """Number of ids that are reserved for a summary."""
        return self.state.budget(int(SUMMARY_SHARE * self.segment.context_tokens))

    def carried(self, new: Sequence[Message]) -> tuple[AnyChat, Sequence[int]]:
        """Return the chat and ids for a fork in which `new` is the answer; this conversation doesn't change."""
        chat = self.chat.branch()
        if self.reply is None:
            chat = open_chat(self.engine, chat.tools, [*chat.messages, *new])
            return chat, chat.prompt_ids()
        with boundary(EnvError, f"{self.state.name}: the messages of fork"):
            delta = chat.extend(self.reply.ids, self.reply.message, new, stopped=self.reply.stopped)
        return chat, chat.prompt_ids() if delta is None else self.segment.token_ids + id_array(delta)

    def _move(self, new: Sequence[Message], what: str) -> Sequence[int] | None:
        assert self.reply is not None
        reply, self.reply = self.reply, None
        try:
            return self.chat.extend(reply.ids, reply.message, new, room=self.segment.room, stopped=reply.stopped)
        except BaseException as error:
            boundary(EnvError, f"{self.state.name}: {what}").cross(error)
            raise

    def rerender(self, prompt: Sequence[int] | None = None) -> None:
        """Continue from the conversation as the template rewrote it; reuse the part of the segment that still matches.

        Args:
            prompt: The ids of the conversation; None encodes them.
        """
        prompt, segment = self.chat.prompt_ids() if prompt is None else prompt, self.segment
        match = reconcile(segment, prompt)
        if match.drift is Drift.FORK:
            self.state.count("rerenders")
            self.open("rerender", list(self.chat.messages), prompt, segment.index)
        elif match.drift is Drift.REALIGN:
            self.state.count("realigned")
            segment.realign(match.shared, prompt[match.shared :])
        else:
            segment.extend(prompt[match.shared :])

    async def _compact(self, policy: Compact, new: Sequence[Message]) -> StopReason | None:
        """Let the model write a summary, then continue in a new segment from the messages that `policy.keep` returns.

        The model reads the answer to its last turn, and then the request for a summary. If the answer doesn't fit into
        this segment, the request follows the last turn directly. The last turn and the answer then follow the kept
        messages in the next segment.

        Args:
            policy: The settings of compactions.
            new: The answer to the last turn.

        Returns:
            None, or the StopReason if the summary could not be finished.
        """
        assert self.reply is not None
        segment, asked = self.segment, len(self.segment.turns) - 1
        chat, reply, what = self.chat.branch(), self.reply, "the instruction of Compact"
        ask, carried = Message(role="user", content=policy.instruction), list[Message]()
        delta = self._move([*new, ask], what)
        if self._length(delta) + self._summary_room > self.segment.context_tokens:
            self.chat, self.reply = chat, reply
            delta = self._move([ask], what)
            carried = [self.chat.messages[-2], *new]
            self.state.count("answers_carried")
        segment.set_answer(asked, [*segment.turns[asked].env_messages, ask])
        self._append(delta)
        since = self.chat.messages[len(self.first) : -2 if carried else -1]
        summary = await self.query(counts=False)
        if isinstance(summary, StopReason):
            return summary
        text = calls_as_text(summary)["content"]  # A call in the summary isn't made.
        if not text.strip():
            self.state.count("empty_summaries")
        with boundary(EnvError, f"{self.state.name}: keep"):
            kept = policy.keep(self.first, since, text)
        if carried:  # This segment continued without the answer, which goes to the next one.
            segment.set_answer(asked, [ask])
        self.state.count("compactions")
        self._restart("compaction", [*read_messages(kept, f"{self.state.name}: keep"), *carried])
        return None

    def _slide(self, policy: Window, delta: Sequence[int] | None) -> None:
        """Continue in a new segment from the first prompt and the last turns.

        If this segment contains nothing else, the conversation stays in it.

        Args:
            policy: The settings of the window.
            delta: The ids after the last turn, or None, as in `_append`.
        """
        since = self.chat.messages[len(self.first) :]
        last = last_turns(since, policy.keep)
        if len(last) == len(since):
            self._append(delta)
        else:
            self.state.count("slides")
            self._restart("rerender", [*self.first, *last])

    def _restart(self, kind: SegmentKind, messages: Sequence[Message]) -> None:
        self.reply = None
        self.chat = open_chat(self.engine, self.chat.tools, messages)
        with boundary(EnvError, f"{self.state.name}: the messages kept"):
            prompt = self.chat.prompt_ids()
        self.open(kind, messages, prompt, self.segment.index)

    def _seed(self) -> int:
        """Return a seed for this turn only, so that its samples don't depend on any other turn or rollout."""
        place = self.opened - 1  # the number of the open segment
        return seed_for("turn", self.state.seed, self.state.rollout_id, self.name, place, len(self.segment.turns))


def open_root(state: RolloutState, env: Env[Any], first: Sequence[Message]) -> Conversation:
    """Open the first conversation of a rollout.

    Raises:
        ContextOverflow: If the prompt fills the context.
    """
    model = env.root_engine or ""
    speaker = Speaker(model=model, trained=env.root_trained and not model)
    chat = open_chat(state.engine_of(model), env.tools, first)
    conversation = Conversation(state, chat, first, CallIds((state.seed,), first), speaker=speaker)
    conversation.open("root", first, chat.prompt_ids(), None)
    if conversation.segment.room <= 0:
        limit = conversation.segment.context_tokens
        engines = conversation.engine.context_tokens < state.limits.context_tokens
        setting = "the engine's context_tokens" if engines else "limits.context_tokens"
        raise ContextOverflow(
            f"{state.name}: the first prompt fills the {limit} tokens of {setting}; shorten the prompt, or raise this "
            "setting"
        )
    return conversation


_GENERATE = boundary(EngineError, "generate")


def _ids_of(completion: Any, budget: int) -> "array[int]":
    """Return the ids of an engine's response.

    Raises:
        EngineError: If it isn't a Completion, was aborted, or is longer than the budget.
    """
    if not isinstance(completion, Completion):
        raise EngineError(f"the engine must return an agentgym.types.Completion, got {completion!r:.80}")
    if completion.finish_reason == "abort":
        raise EngineError("the engine aborted the turn")
    if len(completion.token_ids) > budget:
        raise EngineError(f"the engine sampled {len(completion.token_ids)} ids, but at most {budget} were requested")
    return array("q", completion.token_ids.tobytes())
