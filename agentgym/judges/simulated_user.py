"""Simulated users: a model role plays the other side of a conversation, and none of its tokens is trained."""

from collections.abc import Sequence
from typing import Any, ClassVar

from agentgym.environments.env import TaskT
from agentgym.environments.forks import Model
from agentgym.environments.tool_env import ToolEnv
from agentgym.tools.declarations import check_awaited
from agentgym.types.messages import Message, joined
from agentgym.types.rollout import StopReason
from agentgym.types.task import StepResult

STOP = "###STOP###"
"""What a user writes when the conversation is over for it."""


class SimulatedUser:
    """A user whom a model plays: it is told who it is, reads what the agent says, and answers until it stops.

    To the model the roles are the other way round: its own words are the assistant's, and the agent's are the user's.
    """

    def __init__(self, model: Model, system: str, *, max_tokens: int = 512, temperature: float = 0.0) -> None:
        self.model, self.max_tokens, self.temperature = model, max_tokens, temperature
        self.messages = [Message(role="system", content=system)]
        """The conversation as the model sees it."""
        self.stopped = False
        """Whether it has ended the conversation."""

    async def answer(self, said: str) -> str:
        """Return what the user says to the agent's words; `stopped` is true where it ends the conversation with that.

        What stands before the word of the end is returned, "" where nothing does.
        """
        self.messages.append(Message(role="user", content=said))
        text = await self.model.ask(self.messages, max_tokens=self.max_tokens, temperature=self.temperature)
        self.messages.append(Message(role="assistant", content=text))
        before, word, _ = text.partition(STOP)
        self.stopped = bool(word)
        return before.strip() if word else text


class UserEnv(ToolEnv[TaskT]):
    """A ToolEnv whose agent talks with a simulated user: an answer without a tool call goes to the user.

    The rollout ends when the user stops ("done"), when a tool stops it, or at a limit. `self.user.messages` is the
    conversation as the user saw it.
    """

    user_model: ClassVar[str] = "user"
    """The name of the model that plays the user."""
    greeting: ClassVar[str] = "Hello! How can I help you?"
    """What the agent is taken to have said first, before the user's first words."""
    user_max_tokens: ClassVar[int] = 512
    """Most tokens of one answer of the user."""
    user_temperature: ClassVar[float] = 0.0
    """The temperature of the user's words."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        made: type = cls
        check_awaited(made, "user_system")

    async def user_system(self) -> str:
        """Return who the user is, what they want and what they know; it is told how to stop besides."""
        raise NotImplementedError(f"{type(self).__name__}.user_system(): say who the user is")

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return the first messages, with what the user says first behind them."""
        messages, info = await super().reset(seed=seed, options=options)
        system = f"{await self.user_system()}\n\n{_MANNER}"
        model = self.model(self.user_model)
        self.user = SimulatedUser(model, system, max_tokens=self.user_max_tokens, temperature=self.user_temperature)
        return _with_first_words(messages, await self.user.answer(self.greeting)), info

    async def step(self, action: Message) -> StepResult:
        """Make the calls, or let the user answer."""
        if action.get("tool_calls"):
            return await super().step(action)
        self.answer = action["content"]
        said = await self.user.answer(self.answer)
        self.metrics["user_turns"] = self.metrics.get("user_turns", 0.0) + 1
        if self.user.stopped:
            return StepResult([], 0.0, True, False, {"stop_reason": StopReason.DONE})
        return StepResult([Message(role="user", content=said)], 0.0, False, False, {})


_MANNER = (
    "You are this user, in a conversation with an agent. Say one short thing at a time, and only what the user would "
    f"say. Do not invent what you were not told. When you have what you want, or cannot get it, write {STOP}"
)


def _with_first_words(messages: Sequence[Message], said: str) -> list[Message]:
    """Return the messages with the user's first words: templates want no two messages of a user in a row."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], Message(role="user", content=joined([messages[-1]["content"], said], "\n\n"))]
    return [*messages, Message(role="user", content=said)]
