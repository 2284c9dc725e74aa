"""Conversations of an agent that sends all of its messages each time, found again by what they begin with.

::

    sent before   S U                      answered with a, which was sampled
    sent now      S U a V      extends     goes on in the segment: the ids of a as they were sampled, then V
    sent now      S U a W      extends it, too: a fork, whose prefix has the same ids and is not trained again
    sent now      S U          again: a fork, and another draw
    sent now      S U b V      edited: a new segment, rendered whole
    sent now      S X          the same head, and no turn of before: a compaction
    sent now      T Y          another head: a sub-agent

Messages are compared as the agent sees them. What it leaves out of a turn, such as its reasoning, is in the ids.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentgym.agents.requests import AgentAnswer, AgentRequest, LimitError, RefusedError
from agentgym.chat.chat import Chat
from agentgym.chat.fitting import is_malformed
from agentgym.engines.messages import MessageEngine
from agentgym.errors import EngineError
from agentgym.failures import describe
from agentgym.messages import Message
from agentgym.rollouts.conversation import Conversation, Reply
from agentgym.rollouts.rollout_state import RolloutState
from agentgym.rollouts.segment import OpenSegment, OpenTurn, id_array
from agentgym.types import SegmentKind, StopReason


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A sampled turn, and all that a request which goes on behind it needs."""

    conversation: Conversation
    segment: OpenSegment
    chat: Chat
    """As it was before the turn; it is branched before it is changed."""
    reply: Reply
    turn: OpenTurn
    stop: int
    """The end of the turn in its segment, as it was sampled."""

    @property
    def is_last(self) -> bool:
        """Whether its segment ends with it."""
        return self.conversation.segment is self.segment and len(self.segment.token_ids) == self.turn.stop


class PromptedPolicy:
    """The policy of one rollout, asked with whole conversations; every sampled id stands in one segment.

    Requests may come at once. One that is cancelled, or meets a limit, leaves its conversation where the same request
    goes on.
    """

    def __init__(self, state: RolloutState) -> None:
        """Raise EngineError for an engine that is asked with messages, which knows no ids."""
        if isinstance(state.engine, MessageEngine):
            raise EngineError(
                f"{state.name}: an agent's requests become segments of token ids, which {type(state.engine).__name__} "
                "has none of; give the agent's program the endpoint's own address, or play it on another engine"
            )
        self.state = state
        self._sampled: dict[str, list[_Sampled]] = {}
        """The sampled turns by the key of the conversation that ends with them."""
        self._waiting: dict[str, list[Conversation]] = {}
        """Conversations whose turn was asked for and not sampled."""
        self._openings: dict[str, int] = {}
        """The segments that opened without a turn of before, by the key of what they opened with."""
        self._heads: dict[str, int] = {}
        """The segment that was used last, by the key of its tools and system messages."""
        self._last: int | None = None
        """The segment that was used last."""

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Sample the next turn of a conversation; RefusedError where the request or a limit does not allow it."""
        state = self.state
        if state.turns >= state.limits.turns:
            raise _limit(StopReason.TURNS, f"all {state.limits.turns} turns")
        keys = _keys(request)
        conversation = self._conversation(request, keys)
        self._heads[_head(request)] = self._last = conversation.segment.index
        turns = len(conversation.segment.turns)
        try:
            ended = await conversation.query(max_tokens=request.max_tokens, stop=request.stop)
        finally:
            if len(conversation.segment.turns) == turns:
                self._waiting.setdefault(keys[-1], []).append(conversation)
        if len(conversation.segment.turns) == turns:
            raise _limit(StopReason(str(ended)), f"all {state.limits.tokens} tokens")
        return self._note(request, keys[-1], conversation)

    def count(self, request: AgentRequest) -> int:
        """Return how many ids the conversation of a request has, rendered whole."""
        return len(_rendered(Chat(self.state.engine.tokenizer, request.tools, request.messages)))

    def _conversation(self, request: AgentRequest, keys: Sequence[str]) -> Conversation:
        """The conversation that the request goes on in, its prompt in place; no await lies within."""
        if waiting := self._waiting.get(keys[-1]):
            return waiting.pop()
        for place in range(len(keys) - 1, -1, -1):
            if found := self._sampled.get(keys[place]):
                new = request.messages[place:]
                sampled = next((turn for turn in found if turn.is_last), found[-1])
                if any(message["role"] == "assistant" for message in new):
                    return self._open("rerender", request, self._whole(request), sampled.segment.index)
                return self._extended(request, sampled, new)
        return self._opened(request, keys[-1])

    def _extended(self, request: AgentRequest, sampled: _Sampled, new: Sequence[Message]) -> Conversation:
        """Go on behind a sampled turn: in its segment where that ends with it, else in a fork."""
        chat, segment = sampled.chat.branch(), sampled.segment
        reply = sampled.reply
        with _refusing():
            delta = chat.extend(reply.ids, reply.message, new, stopped=reply.stopped)
        holds = delta is not None and sampled.turn.stop == sampled.stop
        prompt = segment.token_ids[: sampled.stop] + id_array(delta or ()) if holds else _rendered(chat)
        self._check_room(prompt)
        if not sampled.is_last:
            return self._open("fork" if holds else "rerender", request, (chat, prompt), segment.index)
        conversation = sampled.conversation
        segment.answer(new)
        conversation.chat, conversation.reply = chat, None
        if holds:
            segment.extend(prompt[len(segment.token_ids) :])
        else:
            conversation.rerender()
        return conversation

    def _opened(self, request: AgentRequest, key: str) -> Conversation:
        """Open a conversation that holds no turn of this rollout."""
        opened = self._whole(request)
        kind: SegmentKind = "root"
        parent = None
        if key in self._openings:
            kind, parent = "fork", self._openings[key]
        elif (last := self._heads.get(_head(request))) is not None:
            kind, parent = "compaction", last
        elif self._last is not None:
            kind, parent = "subagent", self._last
        conversation = self._open(kind, request, opened, parent)
        self._openings.setdefault(key, conversation.segment.index)
        return conversation

    def _whole(self, request: AgentRequest) -> tuple[Chat, Sequence[int]]:
        chat = Chat(self.state.engine.tokenizer, request.tools, request.messages)
        prompt = _rendered(chat)
        self._check_room(prompt)
        return chat, prompt

    def _open(
        self, kind: SegmentKind, request: AgentRequest, opened: tuple[Chat, Sequence[int]], parent: int | None
    ) -> Conversation:
        chat, prompt = opened
        conversation = Conversation(self.state, chat, request.messages, f"{len(self.state.segments)}.")
        conversation.open(kind, request.messages, prompt, parent)
        if kind != "root":
            self.state.count(f"{kind}s")
        return conversation

    def _check_room(self, prompt: Sequence[int]) -> None:
        limit = min(self.state.limits.context_tokens, self.state.engine.context_tokens)
        if len(prompt) >= limit:
            raise LimitError(
                StopReason.CONTEXT,
                f"This model's maximum context length is {limit} tokens, and the messages have {len(prompt)}.",
            )

    def _note(self, request: AgentRequest, key: str, conversation: Conversation) -> AgentAnswer:
        """Keep the turn that was sampled last, so that later requests find it; the answer that the agent sees."""
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
        sampled = _Sampled(conversation, segment, chat, reply, turn, turn.stop)
        self._sampled.setdefault(_next_key(key, answer.message), []).append(sampled)
        return answer


class _refusing:
    """Turn what a template says against the agent's messages into RefusedError."""

    def __enter__(self) -> None:
        """Do nothing: only the end of the block matters."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise RefusedError(f"messages: the model's chat template refuses them: {describe(error)}", field="messages")


def _rendered(chat: Chat) -> Sequence[int]:
    with _refusing():
        return chat.prompt_ids()


def _shown(request: AgentRequest, chat: Chat, reply: Reply) -> Message:
    """The message as the agent sees it: calls that it can read, or the text that the model wrote."""
    message = reply.message
    if "tool_calls" not in message or (request.tools and not is_malformed(message)):
        return message
    text = chat.tokenizer.decode(reply.ids[:-1] if reply.stopped else reply.ids)
    return Message(role="assistant", content=text)


def _cut(answer: AgentAnswer, stop: Sequence[str]) -> AgentAnswer:
    """The answer without the text that ended it, and what it wrote behind that."""
    content = answer.message["content"]
    found = [(content.index(text), text) for text in stop if text in content]
    if not found:  # It stands where the message shows it as something else, such as a call's arguments.
        return replace(answer, end="stop_text")
    at, text = min(found)
    message = answer.message | Message(role="assistant", content=content[:at])
    return replace(answer, message=message, end="stop_text", stop_text=text)


def _limit(reason: StopReason, what: str) -> LimitError:
    return LimitError(reason, f"the rollout is over: {what} of its limits are used up")


def _keys(request: AgentRequest) -> list[str]:
    """The key of the tools, and then that of each beginning of the conversation."""
    keys = [_hashed("", request.tools)]
    for message in request.messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _head(request: AgentRequest) -> str:
    """The key of the tools and the system messages before all others."""
    key = _hashed("", request.tools)
    for message in request.messages:
        if message["role"] != "system":
            break
        key = _next_key(key, message)
    return key


def _next_key(key: str, message: Message) -> str:
    """The key of a conversation and the message behind it; a turn without outer spaces, reasoning, ids of calls."""
    content = message["content"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    is_turn = message["role"] == "assistant"
    return _hashed(key, [message["role"], content.strip() if is_turn else content, calls, message.get("tool_call_id")])


def _hashed(key: str, value: Any) -> str:
    text = json.dumps([key, value], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
