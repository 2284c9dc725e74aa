"""One env x one engine -> one Rollout."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from agentgym.boxes import Box, Boxes
from agentgym.chat.chat import Chat
from agentgym.engines.base import Engine
from agentgym.environments.env import Env, TaskT, threads_ended
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_task
from agentgym.errors import AgentGymError, ContextOverflow, EngineError, EnvError, Failure, SandboxError, boundary
from agentgym.rollouts.conversation import Conversation, RolloutState
from agentgym.rollouts.forks import ConversationForks
from agentgym.rollouts.step_result import read_metrics, read_reset, read_rewards, read_step
from agentgym.time_limits import TimeLimit, time_limit
from agentgym.types import Rollout, Sampling, StopReason


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
        self.cls, self.task, self.name = cls, task, cls.__name__
        self.closed = False
        self.cancellations = 0
        """Of the running task, when the attempt began."""
        self.state = RolloutState(
            name=self.name,
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

    async def run(self, boxes: Boxes | None, retry: int) -> Rollout:
        """The whole attempt, from the lease of its box to its return."""
        start = time.perf_counter()
        digest: str | None = None
        state, running = self.state, asyncio.current_task()
        assert running is not None
        self.cancellations = running.cancelling()
        try:
            async with AsyncExitStack() as stack:
                self._at_exit(stack, EngineError, "release", lambda: state.release(f"{state.rollout_id}/"))
                with boundary(EnvError, f"{self.name}(task)"):
                    env = self.cls(self.task)
                self._at_exit(stack, EnvError, f"{self.name}.close", lambda: self._close(env))
                if self.cls.sandbox is not None and boxes is not None:
                    env.box = await self._lease(stack, boxes)
                    digest = env.box.digest
                    # Once more, for it is called once: before the box goes back.
                    self._at_exit(stack, EnvError, f"{self.name}.close", lambda: self._close(env))
                stop_reason, failure = await self._play_and_score(env), None
        except AgentGymError as error:
            if running.cancelling() > self.cancellations:
                raise asyncio.CancelledError from error  # what failed on the way out must not keep it in
            said = "; ".join([str(error), *getattr(error, "__notes__", ())])
            stop_reason, failure = StopReason.ERROR, Failure(type=type(error).__name__, message=said)
            self.may_be_retried = not self.touched and isinstance(error, EngineError | SandboxError)
        state.metrics["seconds"] = time.perf_counter() - start
        state.metrics["turns"] = state.turns
        if retry:
            state.metrics["retries"] = retry
        return Rollout(
            rollout_id=state.rollout_id,
            group_id=self.task.id,
            segments=tuple([segment.close() for segment in state.segments]),
            reward=self.reward if failure is None else None,
            rewards=self.rewards,
            stop_reason=stop_reason,
            failure=failure,
            metrics=state.metrics,
            box=digest,
        )

    async def _play_and_score(self, env: Env[Any]) -> str:
        """Play within the limit, then score once, within as long again; the stop reason."""
        seconds = self.cls.limits.seconds
        try:
            async with time_limit(seconds) as deadline:
                stop_reason, is_scored = await self._play(env, deadline)
        except TimeoutError:
            stop_reason, is_scored = StopReason.SECONDS, False
        if not is_scored:
            async with self._within(f"{self.name}.score"):
                scores = await env.score()
            self._credit(0.0, read_rewards(scores, f"{self.name}.score"))
        self.state.metrics |= read_metrics(env.metrics, f"{self.name}.metrics")
        return stop_reason

    async def _play(self, env: Env[Any], deadline: TimeLimit) -> tuple[str, bool]:
        """Turn after turn; the stop reason, and whether the last step gave the outcome, so that none is asked for."""
        with boundary(EnvError, f"{self.name}.reset"):
            answer = await env.reset(seed=self.state.seed)
        first = read_reset(answer, f"{self.name}.reset")
        with boundary(EnvError, f"{self.name}: first prompt"):
            conversation = Conversation(self.state, Chat(self.state.engine.tokenizer, env.tools, first), first)
            conversation.open("root", conversation.chat.prompt_ids(), None)
        if conversation.segment.room <= 0:
            limit = conversation.segment.context_tokens
            engines = self.state.engine.context_tokens < self.cls.limits.context_tokens
            whose = "the engine's context_tokens" if engines else "limits.context_tokens"
            raise ContextOverflow(f"{self.name}: the first prompt fills the {limit} tokens of {whose}")
        env._forks = ConversationForks(conversation)
        while not conversation.out_of_turns():
            ended = await self._turn(env, conversation, deadline)
            if ended is not None:
                return ended
        return StopReason.TURNS, False

    async def _turn(self, env: Env[Any], conversation: Conversation, deadline: TimeLimit) -> tuple[str, bool] | None:
        """One turn of the policy and the env's answer; None: the next turn may be sampled."""
        message = await conversation.sample()
        if isinstance(message, StopReason):
            return message, False
        self.touched = True
        with boundary(EnvError, f"{self.name}.step"):
            answer = await env.step(message)
        step = read_step(answer, f"{self.name}.step")
        self._credit(step.reward, step.rewards)
        conversation.segment.credit(step.reward)
        if step.terminated or step.truncated:
            return step.stop_reason, bool(step.rewards)
        if conversation.out_of_turns():
            return StopReason.TURNS, False
        if deadline.expired():  # a tool has swallowed it, by a bare `except`
            return StopReason.SECONDS, False
        self._raise_if_cancelled()
        ended = await conversation.answer(step.messages)
        return None if ended is None else (ended, False)

    def _raise_if_cancelled(self) -> None:
        """A cancellation that a tool has swallowed holds all the same."""
        running = asyncio.current_task()
        if running is not None and running.cancelling() > self.cancellations:
            raise asyncio.CancelledError

    def _credit(self, reward: float, rewards: dict[str, float]) -> None:
        self.reward += reward + sum(rewards.values())
        if not math.isfinite(self.reward):
            raise EnvError(f"{self.name}: the reward is {self.reward}, {rewards}")
        for name, value in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value

    async def _lease(self, stack: AsyncExitStack, boxes: Boxes) -> Box:
        """A box until the stack is left."""
        with boundary(SandboxError, "lease"):
            lease = boxes.lease()
            box = await lease.__aenter__()

        async def give_back(*error: Any) -> bool | None:
            with boundary(SandboxError, "the return of the box"):
                return await lease.__aexit__(*error)

        stack.push_async_exit(give_back)
        return box

    async def _close(self, env: Env[Any]) -> None:
        if not self.closed:
            self.closed = True
            try:
                await threads_ended(env)
            finally:
                async with self._within(f"{self.name}.close"):
                    await env.close()

    @asynccontextmanager
    async def _within(self, where: str) -> AsyncIterator[None]:
        """The env's own work behind the last answer: EnvError where it takes longer than `limits.seconds`."""
        seconds = self.cls.limits.seconds
        with boundary(EnvError, where):
            try:
                async with time_limit(seconds) as limit:
                    yield
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise TimeoutError(f"not done after {seconds:g} s, which is limits.seconds") from error

    @staticmethod
    def _at_exit(
        stack: AsyncExitStack, kind: type[AgentGymError], where: str, work: Callable[[], Awaitable[None]]
    ) -> None:
        """Do this whatever happens; where it fails behind another failure, that one stays and this is added to it."""

        async def leave(_: object, error: BaseException | None, __: object) -> bool:
            try:
                with boundary(kind, where):
                    await work()
            except AgentGymError as failure:
                if not isinstance(error, AgentGymError):
                    raise
                error.add_note(str(failure))
            return False

        stack.push_async_exit(leave)
