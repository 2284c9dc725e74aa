"""Conversations of an agent that sends all its messages with each request, matched by their first messages.

::

    S U          the first request, answered with a, which was sampled
    S U a V      extends: continues the segment with the ids of a as they were sampled, then V
    S U a W      extends the same turn again: a fork, because the segment already continues with V; the ids up to a are
                 the same, and are not trained again
    S U          repeats: a fork, sampled again
    S U b V      edited: a new segment, rendered whole
    S X          the same head, but no earlier turn: a compaction
    T Y          another head: a sub-agent

These are an agent's requests in the order in which they arrive. Each letter is a message: S and T are system messages
(the head, together with the tools), U to Y are other messages of the agent, a is the policy's turn, and b is that turn
as edited by the agent. Messages are compared as the agent sees them. Parts of a turn that it leaves out, such as
reasoning, are still in the ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentgym.agent_api.conversation_keys import beginnings, head_of, next_key
from agentgym.agent_api.large_requests import LargeRequests
from agentgym.agent_api.requests import AgentAnswer, AgentRequest, LimitError, RefusedError
from agentgym.chat.chat import Chat
from agentgym.chat.fitting import is_malformed
from agentgym.config_fields import MAX_STOPS
from agentgym.engines.messages import MessageEngine
from agentgym.errors import EngineError
from agentgym.errors.tracebacks import describe
from agentgym.rollouts.call_ids import CallIds
from agentgym.rollouts.conversation import Conversation, Reply
from agentgym.rollouts.rollout_state import RolloutState
from agentgym.rollouts.segment import OpenSegment, id_array
from agentgym.types.completion import Sampling
from agentgym.types.messages import Message
from agentgym.types.rollout import SegmentKind, StopReason

MAX_CHARACTERS = 64
"""Maximum characters of text per token of the context; longer conversations can't fit and are not rendered."""
MAX_WAITING = 64
"""Maximum number of conversations whose turn was requested and then abandoned, since each retains a segment."""
_TEMPLATE = "messages: the model's chat template rejects them"


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A sampled turn, and everything that a request needs to continue after it."""

    conversation: Conversation
    segment: OpenSegment
    chat: Chat
    """The chat before the turn. It is never changed, because a request that continues it gets a copy."""
    reply: Reply
    number: int
    """Index of the turn in its segment."""
    stop: int
    """Index of the id after the turn's last id when it was sampled; `realign` may have shortened the turn since."""

    @property
    def is_last(self) -> bool:
        """Whether the turn's segment ends with the turn."""
        return (
            self.conversation.segment is self.segment
            and len(self.segment.token_ids) == self.segment.turns[self.number].stop
        )

    @property
    def holds(self) -> bool:
        """Whether the segment still has all ids that the turn sampled."""
        return self.segment.turns[self.number].stop == self.stop


@dataclass(frozen=True, slots=True)
class _Made:
    """The result of preparing a request, before any state changes."""

    chat: Chat
    prompt: Sequence[int]
    behind: _Sampled | None = None
    """The earlier turn that the request continues, if any."""
    new: Sequence[Message] | None = None
    """The request's messages after the turn `behind`.

    None if there is no such turn, or if these messages include a turn that the agent edited.
    """
    holds: bool = False
    """Whether `prompt` starts with the segment's own ids up to the end of the turn `behind`, instead of new ones."""


class PromptedPolicy:
    """Answers an agent's requests, each with a whole conversation, by sampling from the policy of one rollout.

    Each sampled id is trained in one segment. Requests may be concurrent. A request that is cancelled or reaches a
    limit leaves its conversation in a state in which the same request can continue.
    """

    def __init__(self, state: RolloutState) -> None:
        """Raise EngineError for an engine that takes messages, since it has no token ids."""
        if isinstance(state.engine, MessageEngine):
            raise EngineError(
                f"{state.name}: an agent's requests become segments of token ids, but {type(state.engine).__name__} "
                "returns no ids; give the agent's program the address of the endpoint itself, or use another engine"
            )
        self.state = state
        self._sampled: dict[str, list[_Sampled]] = {}
        """The sampled turns by the key of the conversation that ends with them."""
        self._waiting: dict[str, list[Conversation]] = {}
        """Conversations whose turn was requested but not sampled."""
        self._openings: dict[str, int] = {}
        """Index of each segment that was opened by a request without a sampled turn, by the key of that request."""
        self._heads: dict[str, int] = {}
        """Index of the most recently used segment, by the key of a request's tools and system messages."""
        self._last: int | None = None
        """Index of the most recently used segment."""
        self._large = LargeRequests()

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Sample the next turn of a conversation.

        Only an engine error makes the rollout fail.

        Raises:
            RefusedError: If the request is invalid, or a limit doesn't allow it.
        """
        with _refusing("the request"):
            self._check_turns()
            self._check_size(request)
            sampling = self._sampling(request)
            key, conversation = await self._conversation(request)
        turns = len(conversation.segment.turns)
        try:
            ended = await conversation.query(max_tokens=request.max_tokens, sampling=sampling)
        finally:
            if len(conversation.segment.turns) == turns:
                self._waiting.setdefault(key, []).append(conversation)
        if len(conversation.segment.turns) == turns:
            raise _limit(StopReason(str(ended)), f"all {self.state.limits.tokens} tokens")
        with _refusing("the answer"):
            return self._note(request, key, conversation)

    async def count(self, request: AgentRequest) -> int:
        """Return the number of token ids that the request's whole conversation is rendered to."""
        with _refusing("the request"):
            self._check_size(request)
            return len(await self._large.work(request.size, lambda: self._whole(request).prompt))

    def _check_turns(self) -> None:
        if self.state.turns >= self.state.limits.turns:
            raise _limit(StopReason.TURNS, f"all {self.state.limits.turns} turns")

    @property
    def _context(self) -> int:
        return min(self.state.limits.context_tokens, self.state.engine.context_tokens)

    def _check_size(self, request: AgentRequest) -> None:
        """Reject a conversation that can't fit the context, before anything is rendered."""
        messages, limit = request.messages, self._context
        characters = sum(len(message["content"]) for message in messages)
        if len(messages) > limit or characters > limit * MAX_CHARACTERS:
            raise _too_long(limit, f"there are {len(messages)} messages with {characters} characters")

    def _check_room(self, prompt: Sequence[int]) -> None:
        if len(prompt) >= self._context:
            raise _too_long(self._context, f"the messages have {len(prompt)} tokens")

    def _sampling(self, request: AgentRequest) -> Sampling:
        """Return the rollout's sampling settings with the texts that end this turn."""
        sampling = self.state.sampling
        stop = tuple(dict.fromkeys([*sampling.stop, *request.stop]))
        if len(stop) > MAX_STOPS:
            said = (
                f"stop: must contain at most {MAX_STOPS - len(sampling.stop)} texts besides those of the run's sampling"
            )
            raise RefusedError(said, field="stop")
        return replace(sampling, stop=stop) if request.stop else sampling

    async def _conversation(self, request: AgentRequest) -> tuple[str, Conversation]:
        """Find, fork or open the conversation that a request continues, and add the request's prompt to it.

        Returns:
            The key of the request, which is a hash of its tools and messages, and the conversation. Its open segment
            ends with the request's prompt.
        """
        keys, head = await self._large.work(request.size, lambda: (beginnings(request), head_of(request)))
        key = keys[-1]
        made: _Made | None = None
        if key not in self._waiting:
            found = self._found(request, keys)
            made = await self._large.work(request.size, lambda: self._made(request, found))
        # There is no await below, so the state can't change. Other requests may have come first, so we check it again.
        self._check_turns()
        if waiting := self._waiting.get(key):
            conversation = waiting.pop()
            if not waiting:
                del self._waiting[key]
        else:
            assert made is not None
            if sum(map(len, self._waiting.values())) >= MAX_WAITING:
                raise RefusedError(
                    f"the agent has stopped waiting for the answers to {MAX_WAITING} requests; send one of them "
                    "again before a new one",
                    status=429,
                )
            conversation = self._extended(request, made) if made.behind else self._opened(request, key, head, made)
        self._heads[head] = self._last = conversation.segment.index
        return key, conversation

    def _found(self, request: AgentRequest, keys: Sequence[str]) -> tuple[_Sampled, Sequence[Message]] | None:
        """Return the sampled turn that the request continues, and the messages after it; None if there is no such turn.

        Args:
            request: The request.
            keys: The keys of the request's beginnings, shortest first.
        """
        for place in range(len(keys) - 1, -1, -1):
            if found := self._sampled.get(keys[place]):
                return next((turn for turn in found if turn.is_last), found[-1]), request.messages[place:]
        return None

    def _made(self, request: AgentRequest, found: tuple[_Sampled, Sequence[Message]] | None) -> "_Made":
        """Prepare a request and encode its prompt; this changes no state and may run in a thread."""
        if found is None:
            made = self._whole(request)
        elif any(message["role"] == "assistant" for message in found[1]):
            made = replace(self._whole(request), behind=found[0])
        else:
            made = self._behind(*found)
        self._check_room(made.prompt)
        return made

    def _whole(self, request: AgentRequest) -> "_Made":
        with _refusing(_TEMPLATE, "messages"):
            chat = Chat(self.state.engine.tokenizer, request.tools, request.messages)
            return _Made(chat, chat.prompt_ids())

    def _behind(self, sampled: _Sampled, new: Sequence[Message]) -> "_Made":
        """Return the prompt that continues after a sampled turn with the `new` messages.

        The ids up to the turn's end are reused, unless some have been replaced since or the template rewrote earlier
        text. In these cases, the whole conversation is encoded again.
        """
        chat, reply = sampled.chat.branch(), sampled.reply
        with _refusing(_TEMPLATE, "messages"):
            delta = chat.extend(reply.ids, reply.message, new, stopped=reply.stopped)
            if delta is None or not sampled.holds:
                return _Made(chat, chat.prompt_ids(), sampled, new)
        return _Made(chat, sampled.segment.token_ids[: sampled.stop] + id_array(delta), sampled, new, holds=True)

    def _extended(self, request: AgentRequest, made: "_Made") -> Conversation:
        """Continue after a sampled turn, in its segment if the segment ends with it, otherwise in another one."""
        sampled = made.behind
        assert sampled is not None
        if made.holds and not sampled.holds:  # The segment was realigned meanwhile.
            assert made.new is not None
            made = self._behind(sampled, made.new)
            self._check_room(made.prompt)
        if made.new is None or not sampled.is_last:
            return self._open("fork" if made.holds else "rerender", request, made, sampled.segment.index)
        conversation, segment = sampled.conversation, sampled.segment
        segment.answer(made.new)
        conversation.chat, conversation.reply = made.chat, None
        if made.holds:
            segment.extend(made.prompt[len(segment.token_ids) :])
        else:
            conversation.rerender(made.prompt)
        return conversation

    def _opened(self, request: AgentRequest, key: str, head: str, made: "_Made") -> Conversation:
        """Open a conversation for a request that contains no sampled turn of this rollout.

        Args:
            request: The request.
            key: The key of the whole request.
            head: The key of the request's tools and system messages.
            made: The prepared request.
        """
        kind: SegmentKind = "root"
        parent = None
        if key in self._openings:
            kind, parent = "fork", self._openings[key]
        elif (last := self._heads.get(head)) is not None:
            kind, parent = "compaction", last
        elif self._last is not None:
            kind, parent = "subagent", self._last
        conversation = self._open(kind, request, made, parent)
        self._openings.setdefault(key, conversation.segment.index)
        return conversation

    def _open(self, kind: SegmentKind, request: AgentRequest, made: "_Made", parent: int | None) -> Conversation:
        name = f"{len(self.state.segments)}."
        call_ids = CallIds((self.state.seed, name), request.messages)
        conversation = Conversation(self.state, made.chat, request.messages, call_ids, name)
        conversation.open(kind, request.messages, made.prompt, parent)
        if kind != "root":
            self.state.count(f"{kind}s")
        return conversation

    def _note(self, request: AgentRequest, key: str, conversation: Conversation) -> AgentAnswer:
        """Store the last sampled turn so that later requests find it, and return the answer for the agent."""
        segment, chat = conversation.segment, conversation.chat
        assert isinstance(chat, Chat)
        turn = segment.turns[-1]
        finish, ids = turn.finish_reason, segment.token_ids[turn.start : turn.stop]
        reply = Reply(ids, turn.message, finish == "stop")
        answer = AgentAnswer(
            message=_shown(request, chat, reply),
            end="length" if finish == "length" else "stop",
            prompt_tokens=turn.start,
            sampled_tokens=len(ids),
        )
        if finish == "stop_text":
            answer = _cut(answer, request.stop)
        elif finish == "stop" and "tool_calls" in answer.message:
            answer = replace(answer, end="tool_calls")
        sampled = _Sampled(conversation, segment, chat, reply, len(segment.turns) - 1, turn.stop)
        self._sampled.setdefault(next_key(key, answer.message), []).append(sampled)
        return answer


class _refusing:
    """Convert any error in the block to RefusedError, since an agent's request must not make the rollout fail."""

    def __init__(self, what: str, field: str | None = None) -> None:
        self._what, self._field = what, field

    def __enter__(self) -> None:
        """Do nothing; errors are converted when the block ends."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, RefusedError):
            said = (
                f"{self._what}: {describe(error)}" if self._field else f"{self._what} cannot be read: {describe(error)}"
            )
            raise RefusedError(said, field=self._field) from error


def _shown(request: AgentRequest, chat: Chat, reply: Reply) -> Message:
    """Return the message for the agent: the parsed turn, or the turn's text if the agent can't read its calls.

    It can't read them if it offered no tools, or if a call is malformed. The text is what the model wrote.
    """
    message = reply.message
    if "tool_calls" not in message or (request.tools and not is_malformed(message)):
        return message
    text = chat.tokenizer.decode(reply.ids[:-1] if reply.stopped else reply.ids)
    return Message(role="assistant", content=text)


def _cut(answer: AgentAnswer, stop: Sequence[str]) -> AgentAnswer:
    """Return the answer up to, and without, the stop text that ended it."""
    content = answer.message["content"]
    found = [(content.index(text), text) for text in stop if text in content]
    if not found:  # The stop text is in a part that the message represents differently, such as a call's arguments.
        return replace(answer, end="stop_text")
    at, text = min(found)
    message = answer.message | Message(role="assistant", content=content[:at])
    return replace(answer, message=message, end="stop_text", stop_text=text)


def _too_long(limit: int, what: str) -> LimitError:
    return LimitError(StopReason.CONTEXT, f"This model's maximum context length is {limit} tokens, but {what}.")


def _limit(reason: StopReason, what: str) -> LimitError:
    return LimitError(reason, f"the rollout is over: {what} that its limits allow have been used")
