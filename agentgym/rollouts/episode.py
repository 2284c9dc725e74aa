"""One env x one engine -> one Rollout."""

import asyncio
import math
import time
from contextlib import AsyncExitStack
from typing import Any

from agentgym.env import Env, TaskT, close, find_env
from agentgym.errors import AgentGymError, ContextOverflow, EngineError, EnvError, SandboxError, boundary
from agentgym.rollouts.chat import Chat
from agentgym.rollouts.clock import time_limit
from agentgym.rollouts.engine import Engine
from agentgym.rollouts.kid import Forker
from agentgym.rollouts.strand import Record, Strand
from agentgym.task_rows import as_task
from agentgym.types import Boxes, Rollout, Sampling, StopReason


async def rollout(
    env: str | type[Env[TaskT]],
    task: TaskT,
    engine: Engine,
    *,
    boxes: Boxes | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    rollout_id: str | None = None,
) -> Rollout:
    """Play one attempt; what goes wrong in the env, the box or the engine is a Rollout without a reward.

    Without `boxes`, an env that declares a sandbox gets a box of its own for this rollout; SandboxError where none
    can be had at all. The same seed, weights and tool answers give the same tokens. Cancelling closes the env and
    gives the box back. A failed engine or box is tried again, from nothing, up to `limits.retries` times, as long as
    no action had reached the env.
    """
    cls = find_env(env)
    task = as_task(cls, task)
    async with AsyncExitStack() as stack:
        if boxes is None and cls.sandbox is not None:
            boxes = await stack.enter_async_context(cls.sandbox.open(1))
        for retry in range(cls.limits.retries + 1):
            # Nothing of a failed attempt goes into the next: not its env, its box, its ids or its counts.
            episode = Episode(cls, task, engine, sampling or Sampling(), seed, rollout_id or f"{task.id}/0")
            played = await episode.run(boxes, retry)
            if not episode.may_be_retried:
                break
    return played


class Episode:
    """The state of one attempt while it runs."""

    def __init__(
        self, cls: type[Env[Any]], task: Any, engine: Engine, sampling: Sampling, seed: int, rollout_id: str
    ) -> None:
        self.cls, self.task = cls, task
        self.record = Record(
            name=cls.__name__,
            rollout_id=rollout_id,
            engine=engine,
            sampling=sampling,
            seed=seed,
            limits=cls.limits,
            context=cls.context,
        )
        self.reward = 0.0
        self.rewards: dict[str, float] = {}
        self.touched = False
        """Whether an action has reached the env."""
        self.may_be_retried = False

    async def run(self, boxes: Boxes | None, retry: int = 0) -> Rollout:
        """The whole attempt, from the lease of its box to its return."""
        start = time.perf_counter()
        digest: str | None = None
        record = self.record
        try:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self._release)
                with boundary(EnvError, f"{self.cls.__name__}(task)"):
                    env = self.cls(self.task)
                if self.cls.sandbox is not None and boxes is not None:
                    with boundary(SandboxError, "lease"):
                        env.box = await stack.enter_async_context(boxes.lease())
                    digest = env.box.digest
                stack.push_async_callback(self._close, env)
                stop_reason, error = await self._play_and_score(env), None
        except AgentGymError as failure:
            running = asyncio.current_task()
            if running is not None and running.cancelling():
                raise asyncio.CancelledError from failure  # what failed on the way out must not keep it in
            stop_reason, error = StopReason.ERROR, f"{type(failure).__name__}: {failure}"
            self.may_be_retried = not self.touched and isinstance(failure, EngineError | SandboxError)
        record.metrics["seconds"] = time.perf_counter() - start
        record.metrics["turns"] = record.turns
        if retry:
            record.metrics["retries"] = retry
        return Rollout(
            rollout_id=record.rollout_id,
            group_id=self.task.id,
            segments=tuple([segment.close() for segment in record.segments]),
            reward=self.reward if error is None else None,
            rewards=self.rewards,
            stop_reason=stop_reason,
            error=error,
            metrics=record.metrics,
            box=digest,
        )

    async def _play_and_score(self, env: Env[Any]) -> str:
        try:
            async with time_limit(self.cls.limits.seconds) as deadline:
                stop_reason, terminated = await self._play(env)
        except TimeoutError:
            if not deadline.expired():
                raise EnvError(f"{self.cls.__name__}: TimeoutError") from None
            stop_reason, terminated = StopReason.SECONDS, False
        if not terminated:
            with boundary(EnvError, f"{self.cls.__name__}.score"):
                async with asyncio.timeout(self.cls.limits.seconds):
                    self._credit(0.0, await env.score())
        self.record.metrics |= env.metrics
        return stop_reason

    async def _play(self, env: Env[Any]) -> tuple[str, bool]:
        """Turn after turn; the stop reason, and whether the env itself ended it (and scored it)."""
        with boundary(EnvError, f"{self.cls.__name__}.reset"):
            first, _ = await env.reset(seed=self.record.seed)
        with boundary(EnvError, f"{self.cls.__name__}: first prompt"):
            strand = Strand(self.record, Chat(self.record.engine.tokenizer, env.tools, first), first)
            strand.open("root", strand.chat.prompt_ids(), None)
        if strand.segment.room <= 0:
            limit = strand.segment.context_tokens
            engines = self.record.engine.context_tokens < self.cls.limits.context_tokens
            whose = "the engine's context_tokens" if engines else "limits.context_tokens"
            raise ContextOverflow(f"{self.cls.__name__}: the first prompt fills the {limit} tokens of {whose}")
        env._forks = Forker(strand)
        while not strand.out_of_turns():
            ended = await self._turn(env, strand)
            if ended is not None:
                return ended
        return StopReason.TURNS, False

    async def _turn(self, env: Env[Any], strand: Strand) -> tuple[str, bool] | None:
        """One turn of the policy and the env's answer; None: the next turn may be sampled."""
        message = await strand.sample()
        if isinstance(message, StopReason):
            return message, False
        self.touched = True
        with boundary(EnvError, f"{self.cls.__name__}.step"):
            messages, reward, terminated, truncated, info = await env.step(message)
        rewards = info.get("rewards")
        if rewards is None:
            self._credit(reward, {})
            strand.segment.credit(reward)
        else:
            self._credit(0.0, rewards)
        if terminated or truncated:
            return info.get("stop_reason", StopReason.DONE), terminated
        if strand.out_of_turns():
            return StopReason.TURNS, False
        ended = await strand.answer(messages)
        return None if ended is None else (ended, False)

    def _credit(self, reward: float, rewards: dict[str, float]) -> None:
        self.reward += reward + sum(rewards.values())
        if not math.isfinite(self.reward):
            raise EnvError(f"{self.cls.__name__}: the reward is {self.reward}, {rewards}")
        self.rewards |= rewards

    async def _release(self) -> None:
        with boundary(EngineError, "release"):
            for segment in self.record.segments:
                await self.record.engine.release(segment.session)

    async def _close(self, env: Env[Any]) -> None:
        with boundary(EnvError, f"{self.cls.__name__}.close"):
            await close(env)
