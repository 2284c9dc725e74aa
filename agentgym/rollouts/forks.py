"""Forks and sub-agents: conversations with a copy of the env, under the limits of their rollout."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from typing import Any

from agentgym.engines.messages import AnyChat, open_chat
from agentgym.environments.env import Env
from agentgym.environments.forks import ForkKind
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EnvError, boundary
from agentgym.rollouts.conversation import Conversation
from agentgym.rollouts.segment import Speaker
from agentgym.rollouts.step_result import read_messages
from agentgym.tools.calls import calls_written_as, offered
from agentgym.types.messages import Message, text_of
from agentgym.types.rollout import StopReason


class ConversationForks:
    """Opens forks and sub-agents of an env, or of a forked copy of it, from the conversation of that env."""

    def __init__(self, conversation: Conversation, tools: Sequence[str] | None = None) -> None:
        self.conversation = conversation
        self.tools = tools
        """The names of the conversation's tools; None for the root's tools."""

    @asynccontextmanager
    async def __call__(
        self,
        env: Env[Any],
        kind: ForkKind,
        messages: Sequence[Message],
        *,
        tools: Sequence[str] | None,
        sandbox: bool,
        turns: int | None,
        engine: str | None,
        train: bool | None,
        role: str | None,
    ) -> AsyncIterator["RunningAgent"]:
        """Open a fork or sub-agent with the arguments of `Env.fork`.

        At the end of the `async with`, it is closed, and so is its branch of the sandbox.
        """
        # Before the first await, so that fork numbers, and the samples that depend on them, follow the order of the
        # calls.
        if kind == "fork":
            tools = self.tools
        speaker = _speaker(self.conversation.speaker, engine, train, role)
        conversation = self._conversation(env, kind, messages, tools, turns, speaker)
        async with AsyncExitStack() as stack:
            twin = copy(env)
            twin._forks = ConversationForks(conversation, tools)
            if sandbox:
                twin.sandbox = await stack.enter_async_context(await env.sandbox.fork())
            stack.push_async_callback(
                conversation.state.release, f"{conversation.state.rollout_id}/{conversation.name}"
            )
            yield RunningAgent(twin, conversation, tools)

    def _conversation(
        self,
        env: Env[Any],
        kind: ForkKind,
        messages: Sequence[Message],
        tools: Sequence[str] | None,
        turns: int | None,
        speaker: Speaker,
    ) -> Conversation:
        parent = self.conversation
        messages = read_messages(messages, f"{parent.state.name}.fork")
        name = f"{parent.segment.session.removeprefix(parent.state.rollout_id + '/')}.{parent.forks}."
        parent.forks += 1
        if kind == "subagent":
            chat = open_chat(parent.state.engine_of(speaker.model), _schemas(env, tools or ()), messages)
            with boundary(EnvError, f"{parent.state.name}: the messages of fork"):
                opened: tuple[AnyChat, Sequence[int]] = chat, chat.prompt_ids()
        else:
            opened = parent.carried(messages)
        first = messages if kind == "subagent" else parent.first
        chat, prompt = opened
        call_ids = parent.call_ids.branch(name, chat.messages)
        conversation = Conversation(parent.state, chat, first, call_ids, name, turns, speaker)
        conversation.open(kind, list(chat.messages), prompt, parent.segment.index)
        parent.state.count(f"{kind}s")
        return conversation


class RunningAgent:
    """A running fork or sub-agent; see `agentgym.environments.forks.ForkedAgent`."""

    def __init__(self, env: Env[Any], conversation: Conversation, tools: Collection[str] | None) -> None:
        self.env, self.conversation, self.tools = env, conversation, tools
        self.stop_reason: str | None = None
        self._answer: list[Message] | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages of the conversation so far, including the prompt."""
        unanswered = [] if self.conversation.reply is None else [self.conversation.reply.message]
        return [*self.conversation.chat.messages, *unanswered]

    async def run(self) -> str:
        """Run until the agent answers without a call, a tool stops it, or a limit ends it; see `ForkedAgent.run`."""
        while (message := await self.turn()) is not None:
            calls = message.get("tool_calls")
            if not calls:
                self.stop_reason = StopReason.ANSWER
                return str(message["content"])
            if not isinstance(self.env, ToolEnv):
                raise EnvError(
                    f"{type(self.env).__name__}: a forked agent called a tool, but run() supports only the tools of a "
                    "ToolEnv; use turn() and reply() instead, or make the env a ToolEnv"
                )
            with calls_written_as(self.conversation.chat.call_example):
                answers, stop = await self.env.call_tools(calls, self.tools)
            if stop is not None:
                self.conversation.segment.answer(answers)
                self.stop_reason = stop
                return text_of(answers[-1]["content"])
            self.reply(answers)
        return ""

    async def turn(self) -> Message | None:
        """Sample one assistant message; return None if a limit ended the agent (see `stop_reason`)."""
        if self.stop_reason is None and self._answer is not None:
            answer, self._answer = self._answer, None
            self.stop_reason = await self.conversation.answer(answer)
        if self.stop_reason is None and self.conversation.out_of_turns():
            self.stop_reason = StopReason.TURNS
        if self.stop_reason is not None:
            return None
        sampled = await self.conversation.query()
        if isinstance(sampled, StopReason):
            self.stop_reason = sampled
            return None
        return sampled

    def reply(self, messages: Sequence[Message]) -> None:
        """Answer the agent's last turn; the next `turn` uses the answer."""
        if self.conversation.reply is None:
            raise EnvError("reply: the forked agent has no unanswered turn; call turn() first")
        read = read_messages(messages, f"{self.conversation.state.name}: reply")
        self._answer = [*(self._answer or ()), *read]
        self.conversation.segment.answer(read)


def _speaker(parent: Speaker, engine: str | None, train: bool | None, role: str | None) -> Speaker:
    """Return the speaker of a fork or sub-agent; arguments that are None are inherited from the parent."""
    model = parent.model if engine is None else engine
    if model and train:
        raise ValueError(
            f"train: the policy cannot be trained on tokens that the model {model!r} samples; leave `train` out"
        )
    trained = not model and (parent.trained if train is None else train)
    return Speaker(parent.role if role is None else role, model, trained)


def _schemas(env: Env[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    found = {name: made.schema for name, made in offered(env).items()}
    found |= {schema["function"]["name"]: schema for schema in env.tools}
    return [found[name] for name in names]
