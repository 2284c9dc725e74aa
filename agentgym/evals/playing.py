"""Runs single rollouts of an evaluation, in this process or in another one, and opens what they need."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agentgym.engines.base import Engine
from agentgym.engines.token_bytes import bytes_by_model
from agentgym.environments.env import Env
from agentgym.environments.resources import open_resources
from agentgym.environments.task_sandboxes import open_sandboxes
from agentgym.evals.opening import OWN_CHAT, ChatSettings, Model, open_engine
from agentgym.hub import of_field
from agentgym.rollouts.rollout import rollout
from agentgym.rollouts.rollout_warnings import check_env_tools
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling.group_rewards import GroupRewards
from agentgym.scheduling.group_state import CANCELLED, attempt_seed, failed_rollout
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Rollout
from agentgym.types.task import Task

T = TypeVar("T")


class Playing(Protocol):
    """Runs single rollouts of one env with one model."""

    async def play(self, task: Task, rollout_id: str) -> Rollout:
        """Return a rollout of the task, or a failed one if the env's own code cancelled it."""
        ...

    async def judge(self, task: Task, scored: Sequence[Rollout]) -> list[Rollout]:
        """Return a task's scored rollouts with their group rewards added."""
        ...

    def token_bytes(self) -> Callable[[str, Sequence[int]], dict[int, bytes]]:
        """Return a function that maps a model role ("" for the evaluated model) and token ids to the tokens' bytes."""
        ...


@dataclass(frozen=True, slots=True)
class OwnPlaying:
    """Runs rollouts in this process."""

    env: type[Env[Any]]
    engine: Engine
    models: Mapping[str, Engine]
    sandboxes: SandboxPool | None
    sampling: Sampling | None
    seed: int

    async def play(self, task: Task, rollout_id: str) -> Rollout:
        """Return a rollout of the task, or a failed one if the env's own code cancelled it."""
        playing = rollout(
            self.env,
            task,
            self.engine,
            sandboxes=self.sandboxes,
            sampling=self.sampling,
            seed=attempt_seed(self.seed, rollout_id),
            rollout_id=rollout_id,
            models=self.models,
        )
        return await _apart(playing) or failed_rollout(task, rollout_id, CANCELLED)

    async def judge(self, task: Task, scored: Sequence[Rollout]) -> list[Rollout]:
        """Return a task's scored rollouts with their group rewards added."""
        rewards: GroupRewards[Any] = GroupRewards(self.env, self.models)
        added = await _apart(rewards.added(task, scored, seed=self.seed))
        if added is None:
            return [failed_rollout(task, done.rollout_id, f"group_reward: {CANCELLED}") for done in scored]
        return added

    def token_bytes(self) -> Callable[[str, Sequence[int]], dict[int, bytes]]:
        """Return a function that maps a model role ("" for the evaluated model) and token ids to the tokens' bytes."""
        return bytes_by_model(self.engine, self.models)


@asynccontextmanager
async def open_playing(
    env: type[Env[Any]],
    model: Model,
    models: Mapping[str, Model],
    sandboxes: SandboxPool | None,
    sampling: Sampling | None,
    seed: int,
    *,
    at_once: int,
    chat: ChatSettings = OWN_CHAT,
) -> AsyncIterator[OwnPlaying]:
    """Open the model, the model roles and the env's resources, and a sandbox pool unless one is given.

    The pool has sandboxes for `at_once` rollouts. `chat` says how chats with the model are rendered.
    """
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(open_engine(model, chat))
        check_env_tools(env, engine)
        named: dict[str, Engine] = {}
        for name, asked in models.items():
            with of_field(model=f"models[{name!r}]", engine=f"models[{name!r}]"):
                named[name] = await stack.enter_async_context(open_engine(asked))
        if sandboxes is None:
            sandboxes = await stack.enter_async_context(open_sandboxes(env, at_once))
        await stack.enter_async_context(open_resources(env))
        yield OwnPlaying(env, engine, named, sandboxes, sampling, seed)


async def _apart(work: Coroutine[Any, Any, T]) -> T | None:
    """Return the coroutine's result, or None if the coroutine was cancelled but the code that awaits it was not."""
    try:
        return await asyncio.create_task(work)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if waiting is None or waiting.cancelling():
            raise
        return None
