"""An agentgym env as a `gymnasium.Env` over text."""

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium

from agentgym.bridges.episode_player import EpisodePlayer
from agentgym.bridges.gymnasium.texts import CHARSET, fitted
from agentgym.bridges.loop_thread import LoopThread
from agentgym.chat.formats import HERMES
from agentgym.data.endless import Endless
from agentgym.environments.env import Env, Split
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_tasks, split_tasks
from agentgym.sandboxes.protocol import SandboxPool, SandboxSpec
from agentgym.tools.calls import calls_written_as
from agentgym.types.messages import Message, text_of
from agentgym.types.task import Task


def register_gymnasium(env: str | type[Env[Any]], id: str | None = None, **kwargs: Any) -> str:
    """Register an env for `gymnasium.make` and `make_vec`, and return its id.

    Registering the same env again changes nothing.

    Args:
        env: The env, as a class or a name.
        id: The id; None means "agentgym/<class>-v0".
        **kwargs: Arguments of `ExportedEnv`, to which those given to `make` are added.

    Raises:
        ValueError: If the id is already registered with other arguments.
    """
    id = id or f"agentgym/{find_env(env).__name__}-v0"
    given = {"env": env, **kwargs}
    known = gymnasium.registry.get(id)
    if known is None:
        gymnasium.register(id, entry_point=f"{__name__}:{ExportedEnv.__name__}", kwargs=given)
    elif known.kwargs != given:
        raise ValueError(f"id: {id!r} is already registered, with {known.kwargs}; choose another id")
    return id


class ExportedEnv(gymnasium.Env):  # type: ignore[misc]
    """An agentgym env as a synchronous `gymnasium.Env` over text; `close` releases everything and may be called twice.

    An action is the assistant's turn in the Hermes format: plain text, or one or more `<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`. An observation contains the new messages as "role: content". A character outside
    of `CHARSET` becomes "?", and text beyond `max_length` characters loses its middle. Actions are used unchanged.

    The env's limits on turns and seconds truncate the episode; the score is then part of the last reward. Its limits
    on tokens and its compaction don't apply here, because the caller manages the context. The tools' schemas are in
    `info["tools"]` of `reset`, and `info["task"]` is the task's id.

    In `make_vec`, an env with text in `vectorization_mode="async"` needs `vector_kwargs={"shared_memory": False}`,
    because Gymnasium reads text from its shared memory only once, before the first reset.

    With a mixture, each episode belongs to the member of its task, under that member's limits.

    The whole env runs in one asyncio task of a private event loop, so several instances never share a sandbox. Errors
    of the env and its sandbox reach the caller unchanged.

    Args:
        env: The env, as a class or a name.
        split: The split from which the tasks are taken.
        tasks: The tasks to use instead of the split's; None uses the split.
        spec: A sandbox that replaces the one the env declares; None uses the env's.
        sandboxes: An open pool that doesn't belong to another event loop, such as FakeSandboxPool; None opens a new
            one.
        max_length: Maximum characters of an observation and of an action.

    Raises:
        ValueError: If there are no tasks, or the tasks are endless.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        env: str | type[Env[Any]],
        *,
        split: Split = "train",
        tasks: Sequence[Task] | None = None,
        spec: SandboxSpec | None = None,
        sandboxes: SandboxPool | None = None,
        max_length: int = 16_384,
    ) -> None:
        self.cls = find_env(env)
        self.tasks: Sequence[Task] = split_tasks(self.cls, split) if tasks is None else as_tasks(self.cls, tasks)
        if not self.tasks:
            raise ValueError(
                f"tasks: {self.cls.__name__} has no tasks in split {split!r}; pass at least one"
                if tasks is None
                else "tasks: pass at least one"
            )
        if isinstance(self.tasks, Endless):
            raise ValueError(
                f"tasks: {self.cls.__name__} has endless tasks; pass some of them, such as tasks=TASKS[:1000]"
            )
        self.sandbox_spec = spec
        self.sandboxes = sandboxes
        self.max_length = max_length
        self.action_space = gymnasium.spaces.Text(max_length, min_length=0, charset=CHARSET)
        self.observation_space = gymnasium.spaces.Text(max_length, min_length=0, charset=CHARSET)
        self._worker: LoopThread | None = None
        self._player: EpisodePlayer | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode on the task at index `options["task"]`, or on one that the seed picks.

        Args:
            seed: The seed of the task choice and the env; None continues the random stream.
            options: Options that are also passed to the env.

        Returns:
            The observation, and an info dict.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(len(self.tasks)))
        task = self.tasks[(options or {}).get("task", drawn)]
        env_seed = int(self.np_random.integers(1 << 31))
        worker, player = self._open()
        messages, info = worker.run(lambda: player.reset(task, seed=env_seed, options=options))
        return self._text(messages), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the assistant's turn.

        Args:
            action: The assistant's turn as text.

        Raises:
            ResetNeeded: If it is called before the first reset or after the episode has ended.
        """
        worker, player = self._worker, self._player
        env = player.env if player else None
        if worker is None or player is None or env is None:
            raise gymnasium.error.ResetNeeded(f"{self.cls.__name__}: call reset() before step()")
        messages, earned, terminated, truncated, info = worker.run(lambda: _step(player, env, action))
        return self._text(messages), earned, terminated, truncated, info

    def close(self) -> None:
        """Close the env, return its sandbox, close the pool and end the thread."""
        worker, player = self._worker, self._player
        self._worker = self._player = None
        if worker is None or player is None:
            return
        try:
            worker.run(player.close)
        finally:
            worker.close()

    def _open(self) -> "tuple[LoopThread, EpisodePlayer]":
        # Not in the constructor: a vector env makes one copy only to inspect its spaces, and may fork after that.
        self._worker = self._worker or LoopThread()
        self._player = self._player or EpisodePlayer(self.cls, self.sandbox_spec, self.sandboxes)
        return self._worker, self._player

    def _text(self, messages: Sequence[Message]) -> str:
        said = (f"{message['role']}: {text_of(message['content'])}" for message in messages)
        return fitted("\n".join(said), self.max_length)


async def _step(player: EpisodePlayer, env: Env[Any], action: str) -> Any:
    with calls_written_as(HERMES.example):
        return await player.step(HERMES.parse(action, env.tools))
