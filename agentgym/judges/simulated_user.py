"""Simulated users: a model role plays the other side of a conversation, and its tokens are never trained."""

from collections.abc import Sequence
from typing import Any, ClassVar

from agentgym.environments.env import TaskT
from agentgym.environments.forks import Model
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EngineError
from agentgym.tools.declarations import check_awaited
from agentgym.types.messages import Message, joined
from agentgym.types.rollout import StopReason
from agentgym.types.task import StepResult

STOP = "###STOP###"
"""The text that a user writes to end the conversation."""
USER_SILENT = "user_silent"
"""The stop reason of a rollout whose user had nothing to say."""
_REMINDER = f"(Your last message was empty. Write what the user says next, or {STOP} to end the conversation.)"


class SimulatedUser:
    """A user played by a model.

    The model gets a description of the user, reads the agent's messages, and replies until it ends the conversation.
    For this model, the roles are swapped: its own messages have the role "assistant", and the agent's have the role
    "user".

    Args:
        model: The model that plays the user.
        system: The system prompt: who the user is, and how to end the conversation.
        max_tokens: Maximum number of tokens in one reply.
        temperature: Sampling temperature of the replies.
    """

    def __init__(self, model: Model, system: str, *, max_tokens: int = 512, temperature: float = 0.0) -> None:
        self.model, self.max_tokens, self.temperature = model, max_tokens, temperature
        self.messages = [Message(role="system", content=system)]
        """The conversation from the model's point of view."""
        self.stopped = False
        """Whether the user has ended the conversation."""
        self.silent = False
        """Whether it ended because the user had nothing to say."""

    async def answer(self, said: str) -> str:
        """Return the user's reply to the agent's message. If the reply ends the conversation, `stopped` becomes true.

        If the reply is empty, the user is asked once more with a reminder, which `messages` doesn't contain. A second
        empty reply ends the conversation, too, and `silent` becomes true.

        Args:
            said: The agent's message.

        Returns:
            The reply. If the user stops, it is the text before the stop word, which may be "".
        """
        self.messages.append(Message(role="user", content=said))
        text = await self._ask(self.messages)
        if not text.strip():
            self.model.count("empty_answers")
            reminded = Message(role="user", content=joined([said, _REMINDER], "\n\n"))
            text = await self._ask([*self.messages[:-1], reminded])
        if not text.strip():
            self.model.count("empty_answers")
            self.stopped = self.silent = True
            return ""
        self.messages.append(Message(role="assistant", content=text))
        before, word, _ = text.partition(STOP)
        self.stopped = bool(word)
        return before.strip() if word else text

    async def _ask(self, messages: Sequence[Message]) -> str:
        return await self.model.ask(messages, max_tokens=self.max_tokens, temperature=self.temperature)


class UserEnv(ToolEnv[TaskT]):
    """A ToolEnv whose agent talks with a simulated user: a message without a tool call goes to the user.

    The rollout ends when the user stops ("done"), when the user gives two empty answers to one message
    ("user_silent"), when a tool ends it, or at a limit. What the user says before it
    stops is the rollout's last message, which the agent does not answer. `self.user.messages` is the conversation from
    the user's point of view.
    """

    user_model: ClassVar[str] = "user"
    """Name of the model role that plays the user."""
    greeting: ClassVar[str] = "Hello! How can I help you?"
    """The greeting to which the user's first message replies, as if the agent had sent it; the agent doesn't see it."""
    user_max_tokens: ClassVar[int] = 512
    """Maximum number of tokens in one message of the user."""
    user_temperature: ClassVar[float] = 0.0
    """Sampling temperature of the user's messages."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        made: type = cls
        check_awaited(made, "user_system")

    async def user_system(self) -> str:
        """Return a description of the user: who they are, what they want and what they know.

        Instructions for ending the conversation are added to the description.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.user_system(): must be implemented; return a description of the user"
        )

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return the first messages, followed by the user's first message.

        Args:
            seed: Seed of the episode.
            options: Options of the reset, passed on to ToolEnv.
        """
        messages, info = await super().reset(seed=seed, options=options)
        system = f"{await self.user_system()}\n\n{_MANNER}"
        model = self.model(self.user_model)
        self.user = SimulatedUser(model, system, max_tokens=self.user_max_tokens, temperature=self.user_temperature)
        said = await self.user.answer(self.greeting)
        if self.user.stopped:
            raise EngineError(
                f"model {self.user_model!r}: the simulated user's first message, {said!r:.200}, is empty or ends the "
                "conversation, so there is nothing to play; say in user_system what the user wants, and when to stop"
            )
        return _with_first_words(messages, said), info

    async def step(self, action: Message) -> StepResult:
        """Run the message's tool calls, or let the user reply if there are none.

        Args:
            action: The agent's message.
        """
        if action.get("tool_calls"):
            return await super().step(action)
        self.answer = action["content"]
        said = await self.user.answer(self.answer)
        self.metrics["user_turns"] = self.metrics.get("user_turns", 0.0) + 1
        told = [Message(role="user", content=said)] if said else []
        if not self.user.stopped:
            return StepResult(told, 0.0, False, False, {})
        return StepResult(told, 0.0, True, False, {"stop_reason": USER_SILENT if self.user.silent else StopReason.DONE})


_MANNER = (
    "You are this user, in a conversation with an agent. Say one short thing at a time, and only what the user would "
    f"say. Do not invent what you were not told. When you have what you want, or cannot get it, write {STOP}"
)


def _with_first_words(messages: Sequence[Message], said: str) -> list[Message]:
    """Add the user's first message, merged into a preceding user message, since templates reject two in a row."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], Message(role="user", content=joined([messages[-1]["content"], said], "\n\n"))]
    return [*messages, Message(role="user", content=said)]
