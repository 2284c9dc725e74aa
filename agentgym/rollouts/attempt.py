"""One running attempt of a rollout: its sandbox, its env, its turns and its end."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from agentgym.agent_api.env import AgentEnv
from agentgym.engines.base import Engine
from agentgym.environments.env import Env, threads_ended
from agentgym.environments.resources import share_resources
from agentgym.environments.rewards import counted_content, total
from agentgym.environments.task_sandboxes import sandbox_of
from agentgym.errors import (
    AgentGymError,
    ContextOverflow,
    EngineError,
    EnvError,
    Failure,
    MachineError,
    SandboxError,
    SandboxKilledError,
    boundary,
)
from agentgym.machine.clock import keep_time
from agentgym.machine.time_limits import TimeLimit, counting_time_at_gate
from agentgym.rollouts.at_exit import at_exit, leased, too_slow, within_limit
from agentgym.rollouts.conversation import Conversation, open_root
from agentgym.rollouts.forks import ConversationForks
from agentgym.rollouts.prompted import PromptedPolicy
from agentgym.rollouts.rollout_state import RolloutState
from agentgym.rollouts.rollout_warnings import warn_of_cases_without_an_outcome, warn_of_short_context
from agentgym.rollouts.step_result import (
    Step,
    count_untrained,
    read_metrics,
    read_reset,
    read_rewards,
    read_role_rewards,
    read_step,
)
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.sandboxes.protocol.verdicts import kept_cases, noting_failed_cases
from agentgym.seeds import seed_for
from agentgym.tools.calls import calls_written_as
from agentgym.types.completion import Sampling
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout, StopReason
from agentgym.types.task import StepResult

T = TypeVar("T")

SANDBOX_KILLED = "sandbox_killed"
"""The stop reason of a rollout whose sandbox was terminated during a step.

It is also the name of the metric that counts rewards whose sandbox was terminated.
"""


class Ending(NamedTuple):
    """How an attempt's turns ended."""

    stop_reason: str
    is_scored: bool = False
    """Whether the last step returned the outcome, so that the env's `score` isn't called."""


class Attempt:
    """One attempt of a rollout, from its start to its result; each retry is a new one."""

    def __init__(
        self,
        cls: type[Env[Any]],
        task: Any,
        engine: Engine,
        models: Mapping[str, Engine],
        sampling: Sampling,
        seed: int,
        rollout_id: str,
    ) -> None:
        self.cls, self.task, self.name = cls, task, cls.__name__
        self._step = boundary(EnvError, f"{self.name}.step")
        self.state = RolloutState(
            name=self.name,
            rollout_id=rollout_id,
            engine=engine,
            engines=models,
            fallback_models=cls.fallback_models,
            sampling=sampling,
            seed=seed,
            limits=cls.limits,
            context=cls.context,
        )
        self.seconds = cls.limits.seconds
        """Time limit of the attempt's turns, in seconds."""
        self.at_state: Callable[[Conversation, TimeLimit], Awaitable[None]] | None = None
        """A callback for each state, called before the next turn is sampled."""
        self.env: Env[Any] | None = None
        self.digest: str | None = None
        """The digest of the sandbox, once one is leased."""
        self.reward = 0.0
        self.rewards: dict[str, float] = {}
        self.role_rewards: dict[str, float] = {}
        self.stop_reason: str = StopReason.ERROR
        self.failure: Failure | None = None
        self.failed_cases: dict[str, str] = {}
        self.touched = False
        """Whether an action has reached the env."""
        self.may_be_retried = False
        self.retries = 0
        """Number of attempts before this one."""
        self.closed = False
        self.running: asyncio.Task[Any] | None = None
        self.cancellations = 0
        """Number of cancellations of the running asyncio task before the attempt; a later one cancels the attempt."""

    async def run(self, sandboxes: SandboxPool | None) -> None:
        """Run the whole attempt, from leasing its sandbox to returning it; a failure is stored, not raised."""
        loop = asyncio.get_running_loop()
        keep_time(loop)
        start = loop.time()
        self.state.began = self.state.began or start  # a branch has its rollout's start time
        running = asyncio.current_task()
        assert running is not None
        self.running, self.cancellations = running, running.cancelling()
        try:
            with noting_failed_cases() as self.failed_cases, counting_time_at_gate() as held:
                self.stop_reason = await self._opened(sandboxes)
        except AgentGymError as error:
            if running.cancelling() > self.cancellations:
                raise asyncio.CancelledError from error  # an error during cleanup must not stop the cancellation
            self._fail(error)
            if isinstance(error, ContextOverflow):
                warn_of_short_context(self.cls, self.state.engine)
        if running.cancelling() > self.cancellations:  # the env swallowed the cancellation, for example in `score`
            raise asyncio.CancelledError
        if self.stop_reason == StopReason.CONTEXT:
            warn_of_short_context(self.cls, self.state.engine)
        if self.failed_cases:
            self.state.metrics["failed_cases"] = len(self.failed_cases)
        warn_of_cases_without_an_outcome(self.name, self.failed_cases)
        self.state.metrics["seconds"] = max(0.0, loop.time() - start - held.seconds)
        if held.seconds:
            self.state.metrics["held_seconds"] = held.seconds
        self.state.metrics["turns"] = self.state.turns
        count_untrained(self.state.segments, self.state.metrics)
        if self.retries:
            self.state.metrics["retries"] = self.retries

    def rollout(self) -> Rollout:
        """Return the attempt as a validated Rollout."""
        state = self.state
        return Rollout(
            rollout_id=state.rollout_id,
            group_id=self.task.id,
            segments=tuple([segment.close() for segment in state.segments]),
            reward=self.reward if self.failure is None else None,
            rewards=self.rewards,
            stop_reason=self.stop_reason,
            failure=self.failure,
            metrics=state.metrics,
            sandbox=self.digest,
            failed_cases=kept_cases(self.failed_cases),
            role_rewards=self.role_rewards,
        )

    def _fail(self, error: AgentGymError) -> None:
        """Store the error that ended the attempt, and the env's metrics up to then."""
        try:
            self._read_metrics()
        except EnvError as worse:
            if str(worse) != str(error):
                error.add_note(str(worse))
        self.stop_reason, self.failure = StopReason.ERROR, Failure.of(error)
        self.touched |= isinstance(self.env, AgentEnv) and self.state.answers > 0
        self.may_be_retried = not self.touched and isinstance(error, EngineError | MachineError | SandboxError)

    async def _opened(self, sandboxes: SandboxPool | None) -> str:
        """Create the env, lease its sandbox, run the turns, always close everything, and return the stop reason."""
        async with at_exit(EngineError, "release", self.state.release_all):
            env = self._made()
            async with at_exit(EnvError, f"{self.name}.close", self._close):
                spec = sandbox_of(self.cls, self.task)
                if spec is None or sandboxes is None:
                    return await self._play_and_score(env)
                async with leased(sandboxes, spec) as env.sandbox:
                    self.digest = env.sandbox.digest
                    # `close` runs only once: here, before the sandbox is returned, or above if there is no sandbox.
                    async with at_exit(EnvError, f"{self.name}.close", self._close):
                        return await self._play_and_score(env)

    def _made(self) -> Env[Any]:
        with boundary(EnvError, f"{self.name}(task)"):
            self.env = env = self.cls(self.task)
            share_resources(env)
            env._models = self.state.models
        return env

    async def _play_and_score(self, env: Env[Any]) -> str:
        """Run the turns within the time limit, then score once within the same limit, and return the stop reason."""
        deadline = TimeLimit(self.seconds)
        try:
            end = await deadline.bound(self._play(env, deadline))
        except TimeoutError as error:
            if not self.state.segments:
                with boundary(EnvError, f"{self.name}.reset"):
                    raise too_slow(self.seconds) from error
            end = Ending(StopReason.SECONDS)
        except (SandboxKilledError, EnvError) as error:
            reason = _counted(error, env.step) if self.state.segments else ""
            if not reason:
                raise
            end = Ending(reason)
        if not end.is_scored:
            scores = read_rewards(await self._scores(env), f"{self.name}.score")
            self._credit(total(self.cls, scores), scores)
        self.role_rewards = read_role_rewards(env.role_rewards, self.state.segments, self.name)
        self._read_metrics()
        return end.stop_reason

    async def _scores(self, env: Env[Any]) -> Any:
        """Return the env's scores.

        If the code in the sandbox terminated its sandbox or left unusable content, they are {} and add nothing.
        """
        try:
            return await within_limit(f"{self.name}.score", self.cls.limits.seconds, env.score)
        except (SandboxKilledError, EnvError) as error:
            if not (counted := _counted(error, env.score)):
                raise
            self.state.count(counted)
            return {}

    def _read_metrics(self) -> None:
        """Copy the env's metrics into the rollout's."""
        if self.env is not None:
            with boundary(EnvError, f"{self.name}.metrics"):
                self.state.metrics |= read_metrics(self.env.metrics, f"{self.name}.metrics")

    async def _play(self, env: Env[Any], deadline: TimeLimit) -> Ending:
        """Reset the env, then run turn after turn."""
        if isinstance(env, AgentEnv):
            return await self._serve(env)
        return await self._turns(env, await self._reset(env), deadline)

    async def _turns(self, env: Env[Any], conversation: Conversation, deadline: TimeLimit) -> Ending:
        """Repeat: query the model, act in the env, observe its answer."""
        with calls_written_as(conversation.chat.call_example):
            while not conversation.out_of_turns():
                if self.at_state is not None:
                    await self.at_state(conversation, deadline)
                message = await conversation.query()
                if isinstance(message, StopReason):
                    return Ending(message, await self._is_scored_cut(env, conversation))
                ended = await self._observe(conversation, await self._act(env.step, message), deadline)
                if ended is not None:
                    return ended
            return Ending(StopReason.TURNS)

    async def _serve(self, env: AgentEnv[Any]) -> Ending:
        """Reset the env, then answer its agent's requests until the agent ends."""
        first, policy = await self._first(env), PromptedPolicy(self.state)
        with boundary(EnvError, f"{self.name}.play"):
            return Ending(await env.play(policy, first))

    async def _first(self, env: Env[Any]) -> list[Message]:
        seed = seed_for("env", self.state.seed, self.task.id, bits=31)
        with boundary(EnvError, f"{self.name}.reset"):
            answer = await env.reset(seed=seed)
        return read_reset(answer, f"{self.name}.reset")

    async def _reset(self, env: Env[Any]) -> Conversation:
        """Return the root conversation, opened with the env's first messages."""
        first = await self._first(env)
        with boundary(EnvError, f"{self.name}: first prompt"):
            conversation = open_root(self.state, env, first)
        env._forks = ConversationForks(conversation)
        return conversation

    async def _is_scored_cut(self, env: Env[Any], conversation: Conversation) -> bool:
        """Let the env score the turn that a token limit has just cut off, if one was.

        Returns:
            Whether the env returned the outcome, so that its `score` isn't called.
        """
        if conversation.cut is None:
            return False
        step = await self._act(partial(_none_as_nothing, env.step_cut), conversation.cut)
        conversation.segment.answer((), reward=step.reward)
        self._credit(step.reward + sum(step.rewards.values()), step.rewards)
        return bool(step.rewards)

    async def _act(self, method: Callable[[Message], Awaitable[StepResult]], message: Message) -> Step:
        """Return the validated answer of the env's `step` or `step_cut` to one message of the model."""
        self.touched = True
        try:
            answer = await method(message)
        except BaseException as error:
            self._step.cross(error)
            raise
        return read_step(answer, self._step.where)

    async def _observe(self, conversation: Conversation, step: Step, deadline: TimeLimit) -> Ending | None:
        """Process the env's answer; return None if the next turn may be sampled."""
        conversation.segment.answer(step.messages, reward=step.reward)
        if step.reward or step.rewards:
            self._credit(step.reward + sum(step.rewards.values()), step.rewards)
        if step.terminated or step.truncated:
            return Ending(step.stop_reason, bool(step.rewards))
        if conversation.out_of_turns():
            return Ending(StopReason.TURNS)
        if deadline.expired():  # a tool swallowed the timeout with a bare `except`
            return Ending(StopReason.SECONDS)
        if self.running is not None and self.running.cancelling() > self.cancellations:  # a tool swallowed it
            raise asyncio.CancelledError
        ended = await conversation.answer(step.messages)
        return None if ended is None else Ending(ended)

    def _credit(self, reward: float, rewards: dict[str, float]) -> None:
        """Add `reward` to the rollout's reward, and each of `rewards` to its named rewards."""
        self.reward += reward
        if not math.isfinite(self.reward):
            raise EnvError(
                f"{self.name}: the total reward must be finite, got {self.reward}; rewards by name: {rewards}"
            )
        for name, value in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value

    async def _close(self) -> None:
        """Close the env once, after its threads have ended."""
        env = self.env
        if self.closed or env is None:
            return
        self.closed = True
        try:
            await threads_ended(env)
        finally:
            if getattr(env.close, "__func__", None) is not Env.close:  # The default does nothing.
                try:
                    await within_limit(f"{self.name}.close", self.cls.limits.seconds, env.close)
                except (SandboxKilledError, EnvError) as error:  # The policy's code may have caused the error.
                    if not _counted(error, env.close):
                        raise


async def _none_as_nothing(step_cut: Callable[[Message], Awaitable[StepResult | None]], message: Message) -> StepResult:
    """Return what `step_cut` returns, and a result without rewards for None."""
    taken = await step_cut(message)
    return StepResult([], 0.0, True, False, {}) if taken is None else taken


def _counted(error: SandboxKilledError | EnvError, method: Callable[..., Any]) -> str:
    """Return the metric that counts an error caused by the policy's code, or "" for any other error.

    The policy's code causes an error if it terminated its sandbox or left unusable content there.

    Args:
        error: The error.
        method: The env's method that raised the error.
    """
    return SANDBOX_KILLED if isinstance(error, SandboxKilledError) else counted_content(error, error.where, method)
