"""A Gymnasium env as a tool env with one task type, one tool and one reward."""

import asyncio
import re
import threading
from typing import Any, ClassVar

import gymnasium
from pydantic import Field, JsonValue

from agentgym.environments.limits import Limits
from agentgym.environments.rewards import reward
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import ToolError
from agentgym.tools.tool import Stop, tool
from agentgym.types.messages import Message, joined
from agentgym.types.task import Task


class GymnasiumTask(Task):
    """One start of a Gymnasium env: `gymnasium.make(env_id, **kwargs)`, reset with `seed`.

    If `seed` is None, the rollout's seed is used, so each attempt of an evaluation has a different start and
    different chance events.
    """

    env_id: str
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    seed: int | None = None


class GymnasiumToolEnv(ToolEnv[GymnasiumTask]):
    """A Gymnasium env with discrete actions as one tool; the reward is the sum of its rewards.

    The first observation and the list of actions are appended to the task's prompt. The rollout ends when the Gymnasium
    env does, with the stop reason `done` if it terminated and `truncated` if it was truncated. A subclass may name the
    actions in `action_names`, in the order of their numbers, and override `describe` to change how observations read.
    The Gymnasium env is stepped in threads, never in two at once.
    """

    limits = Limits(turns=100)
    action_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, task: GymnasiumTask) -> None:
        super().__init__(task)
        self.gym: Any = None
        self.total = 0.0
        self._lock = threading.Lock()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        messages, info = await super().reset(seed=seed, options=options)
        first = await asyncio.to_thread(self._start, seed if self.task.seed is None else self.task.seed)
        # Appended to the last message, because many templates reject two user messages in a row.
        messages[-1] = messages[-1] | {"content": joined([messages[-1]["content"], first], "\n\n")}
        return messages, info

    def _start(self, seed: int | None) -> str:
        with self._lock:
            self.gym = gymnasium.make(self.task.env_id, **self.task.kwargs)
            if "render_mode" not in self.task.kwargs and "ansi" in self.gym.metadata.get("render_modes", ()):
                self.gym.close()
                self.gym = gymnasium.make(self.task.env_id, **self.task.kwargs, render_mode="ansi")
            observation, _ = self.gym.reset(seed=seed)
            return f"Actions: {', '.join(self._choices())}\n\n{self.describe(observation)}"

    def describe(self, observation: Any) -> str:
        """Return an observation as the model reads it: the "ansi" rendering if there is one, otherwise its `str`.

        Colored text, which such renderings use to highlight a position, becomes [bracketed].
        """
        if self.gym.render_mode == "ansi":
            return re.sub(r"(?:\x1b\[[0-9;]+m)+(.*?)\x1b\[0m", r"[\1]", self.gym.render(), flags=re.DOTALL)
        return str(observation)

    @tool(timeout_s=60)
    def act(self, action: int | str) -> str | Stop:
        """Take one action, by its name or number; the answer shows what it led to."""
        with self._lock:
            observation, earned, terminated, truncated, _ = self.gym.step(self._number(action))
            self.total += float(earned)
            text = self.describe(observation)
        if terminated or truncated:
            return Stop("done" if terminated else "truncated", text)
        return text

    def _choices(self) -> list[str]:
        space = self.gym.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{self.task.env_id}: expected a Discrete action space, got {space}")
        if len(self.action_names) not in (0, space.n):
            raise ValueError(
                f"action_names: got {len(self.action_names)} names for the {space.n} actions of {self.task.env_id}"
            )
        return list(self.action_names or map(str, range(space.start, space.start + space.n)))

    def _number(self, action: int | str) -> int:
        choices, start = self._choices(), int(self.gym.action_space.start)
        numbers = {str(start + i): start + i for i in range(len(choices))}
        numbers |= {name: start + i for i, name in enumerate(choices)}
        if str(action) not in numbers:
            raise ToolError(f"no action {action!r}; the actions are: {', '.join(choices)}")
        return numbers[str(action)]

    @reward
    def gym_return(self) -> float:
        """Return the sum of the Gymnasium env's rewards."""
        return self.total

    async def close(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        # A step that never returns keeps the lock: abandon that env rather than hang with it.
        if self._lock.acquire(timeout=10.0):
            try:
                if self.gym is not None:
                    self.gym.close()
            finally:
                self._lock.release()
