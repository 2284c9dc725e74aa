"""A scripted engine and a byte tokenizer, for tests and demos without a model."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from agentgym.chat.formats import HERMES
from agentgym.chat.special_tokens import SpecialTokens, unbroken
from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.engines.messages import NO_POLICY, MessageCompletion, Usage
from agentgym.errors import EngineError
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.json_values import whole_characters
from agentgym.types.messages import Message, text_of
from agentgym.types.weights import Adapter


def call(name: str, /, **arguments: Any) -> Message:
    """Return a reply that calls one tool.

    Args:
        name: The tool's name.
        **arguments: The call's arguments.
    """
    return calls((name, arguments))


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    """Return a reply that calls several tools in one turn.

    Args:
        *named: A pair of tool name and arguments for each call.
    """
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in named]
    return Message(role="assistant", content="", tool_calls=made)  # type: ignore[typeddict-item]


def say(text: str) -> Message:
    """Return a plain text reply.

    Args:
        text: The reply's text.
    """
    return Message(role="assistant", content=text)


def raw(text: str) -> str:
    """Return a reply that consists of exactly this text, such as a malformed call.

    Args:
        text: The turn's text. The engine appends the stop token.
    """
    return text


Reply: TypeAlias = Message | str


ReplyPolicy: TypeAlias = Callable[[str], Reply]
"""A function that takes the whole text before the assistant's turn and returns the assistant's reply."""


def check_replies(name: str, replies: Any) -> None:
    """Raise TypeError if `replies`, the argument called `name`, is neither a function nor a list of valid replies."""
    if callable(replies):
        return
    if isinstance(replies, str | bytes | Mapping) or not isinstance(replies, Sequence):
        one = "one reply" if isinstance(replies, str | Mapping) else f"{replies!r:.80}"
        raise TypeError(f"{name}: must be a list of replies, such as [say(...)], or a function of the text, got {one}")
    for place, reply in enumerate(replies):
        _check_reply(f"{name}[{place}]", reply)


def _check_reply(where: str, reply: Any) -> None:
    if not isinstance(reply, str) and not (isinstance(reply, Mapping) and isinstance(reply.get("content"), str)):
        raise TypeError(f"{where}: must be a reply, such as say(...), call(...) or a string, got {reply!r:.80}")


_TURN_MARKS = re.compile(r"(<\|im_start\|>|<\|im_end\|>)")
_BYTES = {i: bytes([i]) for i in range(256)} | {256: b"<|im_start|>", 257: b"<|im_end|>"}
"""The bytes of the ids 0 to 257. A larger id stands for the byte of its value modulo 256."""


class ByteTokenizer:
    """A chat tokenizer with one id per byte, plus one for each of the two turn delimiters, in the Hermes format."""

    START, END = 256, 257
    vocabulary = 258
    splits_at_special_tokens = True
    call_example = HERMES.example
    _special_tokens = {"<|im_start|>": START, "<|im_end|>": END}  # noqa: RUF012
    _contents = SpecialTokens(_special_tokens, _special_tokens)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        parts = [f"<|im_start|>tools\n{self._head(tools)}<|im_end|>\n"] if tools else []
        parts += [f"<|im_start|>{m['role']}\n{self._shown(m)}<|im_end|>\n" for m in messages]
        return "".join(parts) + ("<|im_start|>assistant\n" if generation else "")

    def _head(self, tools: Sequence[dict[str, Any]]) -> str:
        return self._contents.text("".join(json.dumps(tool) + "\n" for tool in tools), "tool")

    def _shown(self, message: Message) -> str:
        return self._contents.text(self._body(message), message["role"])

    def _body(self, message: Message) -> str:
        made = [json.dumps(c["function"]) for c in message.get("tool_calls", ())]
        return "\n".join([*filter(None, [message["content"]]), *(f"<tool_call>\n{c}\n</tool_call>" for c in made)])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _TURN_MARKS.split(text):
            if part in self._special_tokens:
                ids.append(self._special_tokens[part])
            else:
                ids += part.encode() if part.isascii() else unbroken(whole_characters(part))[0].encode()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        try:
            read = bytes([*token_ids])
        except ValueError:  # Some ids aren't bytes.
            read = b"".join([_BYTES.get(i) or bytes([i % 256]) for i in token_ids])
        return read.decode(errors="replace")

    def token_bytes(self, token_ids: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of each id: one byte, or a special token.

        Args:
            token_ids: The ids to look up.
        """
        return {i: _BYTES.get(i) or bytes([i % 256]) for i in token_ids}

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        return HERMES.parse(text, tools)


class Scripted:
    """An engine that replies from a script, or by calling a function with the text so far.

    It implements all of `Engine`. Each rollout starts at the script's beginning. Every log-probability is -0.5.

    Args:
        replies: A list of replies, or a function from the text so far to a reply.
        tokenizer: The chat tokenizer; None for a `ByteTokenizer`.
        end: Text of the tokenizer's stop token.
        context_tokens: Maximum number of ids in a request.
        model_name: Distinguishes this engine from other models in caches that are keyed by model, such as a judge's. If
            you change the script, change this name, too, so that no cached response of the old script is used.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | ReplyPolicy,
        *,
        tokenizer: ChatTokenizer | None = None,
        end: str = "<|im_end|>",
        context_tokens: int = 1 << 20,
        model_name: str = "",
    ) -> None:
        check_replies("replies", replies)
        self.replies = replies
        self.model_name = model_name
        self.context_tokens = context_tokens
        self.version = 0
        self.tokenizer = tokenizer or ByteTokenizer()
        self.end = end
        self._played: dict[str, int] = {}
        self._sessions: dict[str, set[str]] = {}

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        reply = self._next(token_ids, session)
        ids = self.tokenizer.encode((reply if isinstance(reply, str) else self._write(reply)) + self.end)
        cut = ids[:max_tokens]
        return Completion(
            token_ids=np.array(cut),
            logprobs=np.full(len(cut), -0.5, np.float32),
            finish_reason="stop" if len(cut) == len(ids) else "length",
            versions=(Version(0, self.version),),
        )

    def _write(self, reply: Message) -> str:
        """Return the reply's text as the chat template renders it, without the delimiters of the turn."""
        ask = Message(role="user", content="")
        body = self.tokenizer.render([ask, reply], [], generation=False).removeprefix(self._opened)
        return body[: body.rindex(self.end)]

    @cached_property
    def _opened(self) -> str:
        """The text of a chat that has only an empty user message, up to where the assistant's reply begins."""
        return self.tokenizer.render([Message(role="user", content="")], [], generation=True)

    def _next(self, token_ids: Sequence[int], session: str) -> Reply:
        if callable(self.replies):
            made = self.replies(self.tokenizer.decode(token_ids))
            _check_reply("return value of the replies function", made)
            return made
        rollout_id = session.rpartition("/")[0]
        self._sessions.setdefault(rollout_id, set()).add(session)
        rollout = self._played.get(rollout_id, 0)
        if rollout == len(self.replies):
            raise EngineError(f"the script has {rollout} replies, but the env requested one more")
        self._played[rollout_id] = rollout + 1
        return self.replies[rollout]

    async def release(self, session: str) -> None:
        rollout_id = session.rpartition("/")[0]
        sessions = self._sessions.get(rollout_id, set())
        sessions.discard(session)
        if not sessions:  # A fork's session is released before its rollout ends.
            self._sessions.pop(rollout_id, None)
            self._played.pop(rollout_id, None)

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        self.version = version

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        return np.full(max(len(token_ids) - 1, 0), -0.5, np.float32)


class Seeing:
    """Wraps a scripted engine so that it takes messages, which may contain images, as `ag.Endpoint` does.

    A reply function sees a placeholder for each image: `[image/png, 12 kB]`.
    """

    version = NO_POLICY

    def __init__(self, scripted: Scripted) -> None:
        self.scripted, self.tokenizer = scripted, scripted.tokenizer
        self.context_tokens = scripted.context_tokens
        self.asked: list[list[Message]] = []
        """The messages of each request, as an endpoint would receive them."""

    async def generate_message(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        session: str,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> MessageCompletion:
        self.asked.append(list(messages))
        shown = [message | Message(role=message["role"], content=text_of(message["content"])) for message in messages]
        prompt = self.tokenizer.encode(self.tokenizer.render(shown, tools, generation=True))
        done = await self.scripted.generate(
            prompt, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed
        )
        ids = done.token_ids[:-1] if done.finish_reason == "stop" else done.token_ids
        message = self.tokenizer.parse(self.tokenizer.decode(ids.tolist()), tools)
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(done.token_ids), requests=1)
        return MessageCompletion(message=message, finish_reason=done.finish_reason, usage=usage)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        raise EngineError("Seeing.generate: this engine takes messages; call generate_message")

    async def release(self, session: str) -> None:
        await self.scripted.release(session)

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        raise EngineError("Seeing.load_adapter: this engine cannot be trained")

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        raise EngineError("Seeing.score: this engine has no log-probabilities")
