"""Forks and sub-agents: strands with a copy of the env, under the rollout's one record."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from typing import Any

from agentgym.chat.chat import Chat
from agentgym.environments.env import Env
from agentgym.environments.forks import ForkKind
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EnvError, boundary
from agentgym.messages import Message
from agentgym.rollouts.conversation import Strand
from agentgym.rollouts.step_result import read_messages
from agentgym.types import StopReason


class Forker:
    """What `Env.fork` works with: it knows the strand that the env (or the kid's copy of it) belongs to."""

    def __init__(self, strand: Strand) -> None:
        self.strand = strand

    @asynccontextmanager
    async def fork(
        self,
        env: Env[Any],
        kind: ForkKind,
        messages: Sequence[Message],
        *,
        tools: Sequence[str] | None,
        box: bool,
        turns: int | None,
    ) -> AsyncIterator["Kid"]:
        """A kid that is closed, with its branch of the box, when the block is left."""
        # Before anything waits: the numbers, and with them the draws, follow the order of the calls.
        strand = self._strand(env, kind, messages, tools, turns)
        async with AsyncExitStack() as stack:
            twin = copy(env)
            twin._forks = Forker(strand)
            if box:
                twin.box = await stack.enter_async_context(await env.box.fork())
            stack.push_async_callback(strand.record.release, f"{strand.record.rollout_id}/{strand.name}")
            yield Kid(twin, strand, tools)

    def _strand(
        self, env: Env[Any], kind: ForkKind, messages: Sequence[Message], tools: Sequence[str] | None, turns: int | None
    ) -> Strand:
        parent = self.strand
        messages = read_messages(messages, f"{parent.record.name}.fork")
        name = f"{parent.segment.session.removeprefix(parent.record.rollout_id + '/')}.{parent.kids}."
        parent.kids += 1
        if kind == "subagent":
            chat = Chat(parent.chat.tokenizer, _schemas(env, tools or ()), messages)
            with boundary(EnvError, f"{parent.record.name}: the messages of fork"):
                prompt, first = chat.prompt_ids(), messages
        else:
            (chat, prompt), first = parent.carried(messages), parent.first
        strand = Strand(parent.record, chat, first, name, turns)
        strand.open(kind, prompt, parent.segment.index)
        parent.record.count(f"{kind}s")
        return strand


class Kid:
    """A fork or a sub-agent while it runs; see `agentgym.environments.forks.Kid`."""

    def __init__(self, env: Env[Any], strand: Strand, tools: Collection[str] | None) -> None:
        self.env, self.strand, self.tools = env, strand, tools
        self.stop_reason: str | None = None
        self._answer: list[Message] | None = None

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, prompt included."""
        unanswered = [] if self.strand.reply is None else [self.strand.reply[1]]
        return [*self.strand.chat.messages, *unanswered]

    async def run(self) -> str:
        """Let it play until it answers without a call or a tool stops it; "" where a limit ended it first."""
        while (message := await self.turn()) is not None:
            calls = message.get("tool_calls")
            if not calls:
                self.stop_reason = StopReason.ANSWER
                return message["content"]
            if not isinstance(self.env, ToolEnv):
                raise EnvError(f"{type(self.env).__name__}: a kid called a tool, and only a ToolEnv has tools")
            answers, stop = await self.env.obey(calls, self.tools)
            if stop is not None:
                self.stop_reason = stop
                return answers[-1]["content"]
            self.tell(answers)
        return ""

    async def turn(self) -> Message | None:
        """One assistant message; None where a limit ended it, and `stop_reason` says which."""
        if self.stop_reason is None and self._answer is not None:
            answer, self._answer = self._answer, None
            self.stop_reason = await self.strand.answer(answer)
        if self.stop_reason is None and self.strand.out_of_turns():
            self.stop_reason = StopReason.TURNS
        if self.stop_reason is not None:
            return None
        sampled = await self.strand.sample()
        if isinstance(sampled, StopReason):
            self.stop_reason = sampled
            return None
        return sampled

    def tell(self, messages: Sequence[Message]) -> None:
        """Answer its last turn, with the next `turn`."""
        if self.strand.reply is None:
            raise EnvError("tell: the kid has no turn that is unanswered")
        self._answer = [*(self._answer or ()), *read_messages(messages, f"{self.strand.record.name}: tell")]


def _schemas(env: Env[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    found = {schema["function"]["name"]: schema for schema in env.tools}
    return [found[name] for name in names]
