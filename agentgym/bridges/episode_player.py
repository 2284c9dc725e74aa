"""Episodes that other libraries run in agentgym's envs, with one env and one sandbox at a time."""

import asyncio
import copy
from contextlib import AsyncExitStack
from typing import Any

from agentgym.environments.env import Env, close
from agentgym.environments.mixture import member_of
from agentgym.environments.resources import open_resources, share_resources
from agentgym.environments.rewards import total
from agentgym.environments.task_sandboxes import lease_for, open_sandboxes, sandbox_of
from agentgym.judges.model_roles import ModelRoles
from agentgym.rollouts.step_result import read_messages
from agentgym.sandboxes.protocol import SandboxPool, SandboxSpec
from agentgym.types.messages import Message
from agentgym.types.rollout import StopReason
from agentgym.types.task import StepResult, Task


class EpisodePlayer:
    """Runs one episode after another; a new episode closes the env of the one before and returns its sandbox."""

    def __init__(self, cls: type[Env[Any]], spec: SandboxSpec | None, sandboxes: SandboxPool | None) -> None:
        self.cls, self.sandbox_spec, self.sandboxes = cls, spec, sandboxes
        self.env: Env[Any] | None = None
        self.episode = AsyncExitStack()
        self.pool = AsyncExitStack()
        self.opened = False
        """Whether the env's resources are open; they stay open until `close`."""

    async def reset(
        self, task: Task, *, seed: int, options: dict[str, Any] | None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Start an episode.

        Args:
            task: The task.
            seed: The env's seed.
            options: Options for the env's `reset`.

        Returns:
            The env's first messages, and an info dict with the task's id and the tools' schemas.
        """
        await self._end()
        cls = member_of(self.cls, task)
        if not self.opened:
            await self.pool.enter_async_context(open_resources(self.cls))
            self.opened = True
        env = cls(task)
        share_resources(env)
        env._models = ModelRoles(
            {}, cls.fallback_models, owner=cls.__name__, session=f"{task.id}/episode", seed=seed, metrics=env.metrics
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(env._models.release)
            spec = sandbox_of(cls, task)
            sandboxes = await self._sandboxes() if spec is not None else None
            if spec is not None and sandboxes is not None:
                env.sandbox = await stack.enter_async_context(lease_for(sandboxes, spec))
            stack.push_async_callback(close, env)
            first, info = await env.reset(seed=seed, options=options)
            messages = read_messages(first, f"{cls.__name__}.reset")
            self.episode = stack.pop_all()
        self.env, self.turns = env, 0
        self.deadline = asyncio.get_running_loop().time() + cls.limits.seconds
        # A copy: a class has a single schema of each tool, and Gymnasium's users may modify what they get.
        return messages, {"task": task.id, "tools": copy.deepcopy(env.tools), **info}

    async def _sandboxes(self) -> SandboxPool | None:
        if self.sandboxes is None:
            self.sandboxes = await self.pool.enter_async_context(open_sandboxes(self.cls, 1, self.sandbox_spec))
        return self.sandboxes

    async def step(self, action: Message) -> StepResult:
        """Take one turn; at the end of the episode the reward includes the scores, and the env is closed."""
        env = self.env
        assert env is not None
        self.turns += 1
        result = await self._limited(env, action)
        rewards: dict[str, float] = dict(result.info.get("rewards") or {})
        if result.terminated or result.truncated:
            return await self._ended(env, result, rewards)
        return result._replace(reward=sum(rewards.values()) if rewards else float(result.reward))

    async def stop(self, reason: str) -> StepResult:
        """End the episode with this stop reason, as if the limit of that name had been reached.

        The reward is the total of the env's scores.
        """
        env = self.env
        assert env is not None
        return await self._ended(env, StepResult([], 0.0, False, True, {"stop_reason": reason}), {})

    async def _ended(self, env: Env[Any], result: StepResult, rewards: dict[str, float]) -> StepResult:
        """Close the env, and return the last step's result with the env's scores in its reward.

        The stop reason, the rewards by name and the metrics are added to the result's `info`.

        Args:
            env: The env.
            result: The result of the last step.
            rewards: The rewards by name that the env returned in that step. If there are none, the env's scores are
                computed and added to the step's reward.
        """
        earned = sum(rewards.values()) if rewards else float(result.reward)
        if not rewards:
            async with asyncio.timeout(type(env).limits.seconds):
                scores = await env.score()
            earned, rewards = earned + total(type(env), scores), rewards | scores
        await self._end()
        stop_reason = str(result.info.get("stop_reason", StopReason.DONE))
        info = {**result.info, "stop_reason": stop_reason, "rewards": rewards, "metrics": dict(env.metrics)}
        return result._replace(reward=float(earned), info=info)

    async def _limited(self, env: Env[Any], action: Message) -> StepResult:
        """Return the env's step, truncated if the limit on turns or seconds is reached."""
        try:
            async with asyncio.timeout_at(self.deadline) as deadline:
                result = StepResult(*await env.step(action))
            result = result._replace(messages=read_messages(result.messages, f"{type(env).__name__}.step"))
        except TimeoutError:
            if not deadline.expired():
                raise
            return StepResult([], 0.0, False, True, {"stop_reason": StopReason.SECONDS})
        if self.turns < type(env).limits.turns or result.terminated or result.truncated:
            return result
        return result._replace(truncated=True, info={**result.info, "stop_reason": StopReason.TURNS})

    async def _end(self) -> None:
        self.env = None
        await self.episode.aclose()

    async def close(self) -> None:
        """Close the env, return its sandbox and close the pool."""
        try:
            await self._end()
        finally:
            await self.pool.aclose()
