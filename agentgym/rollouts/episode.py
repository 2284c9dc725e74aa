"""One env x one engine -> one Rollout."""

import asyncio
import hashlib
import math
import time
from contextlib import AsyncExitStack
from typing import Any

from agentgym.env import Env, TaskT, find_env
from agentgym.errors import AgentGymError, ContextOverflow, EngineError, EnvError, SandboxError, boundary
from agentgym.rollouts.chat import Chat
from agentgym.rollouts.clock import time_limit
from agentgym.rollouts.context import OpenSegment, compacted, wants_compaction
from agentgym.rollouts.engine import Engine
from agentgym.types import Boxes, Completion, Message, Rollout, Sampling, SegmentKind, StopReason


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
    gives the box back.
    """
    cls = find_env(env)
    async with AsyncExitStack() as stack:
        if boxes is None and cls.sandbox is not None:
            boxes = await stack.enter_async_context(cls.sandbox.open(1))
        episode = Episode(cls, task, engine, sampling or Sampling(), seed, rollout_id or f"{task.id}/0")
        return await episode.run(boxes)


class Episode:
    """The state of one rollout while it runs."""

    def __init__(
        self, cls: type[Env[Any]], task: Any, engine: Engine, sampling: Sampling, seed: int, rollout_id: str
    ) -> None:
        self.cls, self.task, self.engine, self.sampling = cls, task, engine, sampling
        self.seed, self.rollout_id = seed, rollout_id
        self.context_tokens = min(cls.limits.context_tokens, engine.context_tokens)
        self.segments: list[OpenSegment] = []
        self.first: list[Message] = []
        self.reward = 0.0
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    @property
    def segment(self) -> OpenSegment:
        return self.segments[-1]

    @property
    def turns(self) -> int:
        """Turns of the policy so far, summaries not counted."""
        return sum(len(segment.turns) for segment in self.segments) - int(self.metrics.get("compactions", 0))

    async def run(self, boxes: Boxes | None) -> Rollout:
        """The whole attempt, from the lease of its box to its return."""
        start = time.perf_counter()
        digest: str | None = None
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
        self.metrics["seconds"] = time.perf_counter() - start
        self.metrics["turns"] = self.turns
        return Rollout(
            rollout_id=self.rollout_id,
            group_id=self.task.id,
            segments=tuple(segment.close() for segment in self.segments),
            reward=self.reward if error is None else None,
            rewards=self.rewards,
            stop_reason=stop_reason,
            error=error,
            metrics=self.metrics,
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
        self.metrics |= env.metrics
        return stop_reason

    async def _play(self, env: Env[Any]) -> tuple[str, bool]:
        """Turn after turn; the stop reason, and whether the env itself ended it (and scored it)."""
        with boundary(EnvError, f"{self.cls.__name__}.reset"):
            self.first, _ = await env.reset(seed=self.seed)
        with boundary(EnvError, f"{self.cls.__name__}: first prompt"):
            self._open("root", Chat(self.engine.tokenizer, env.tools, self.first))
        if self.segment.room <= 0:
            raise ContextOverflow(f"{self.cls.__name__}: the first prompt fills the {self.context_tokens} tokens")
        while self.turns < self.cls.limits.turns:
            ended = await self._turn(env)
            if ended is not None:
                return ended
        return StopReason.TURNS, False

    async def _turn(self, env: Env[Any]) -> tuple[str, bool] | None:
        """One turn of the policy and the env's answer; None: the next turn may be sampled."""
        sampled = await self._sample()
        if isinstance(sampled, StopReason):
            return sampled, False
        completion, message = sampled
        with boundary(EnvError, f"{self.cls.__name__}.step"):
            messages, reward, terminated, truncated, info = await env.step(message)
        rewards = info.get("rewards")
        self._credit(reward if rewards is None else 0.0, rewards or {})
        if terminated or truncated:
            return info.get("stop_reason", StopReason.DONE), terminated
        if self.turns == self.cls.limits.turns:
            return StopReason.TURNS, False
        if wants_compaction(self.cls.context, self.segment):
            return await self._compact(completion, message, messages)
        return self._extend(completion, message, messages)

    async def _sample(self) -> tuple[Completion, Message] | StopReason:
        """Sample one turn into the open segment; StopReason where none could be finished."""
        segment = self.segment
        if segment.room <= 0:
            return StopReason.CONTEXT
        start = time.perf_counter()
        budget = min(self.cls.limits.turn_tokens, self.sampling.max_tokens or segment.room, segment.room)
        with boundary(EngineError, "generate"):
            completion = await self.engine.generate(
                segment.token_ids,
                session=self._session(segment),
                max_tokens=budget,
                sampling=self.sampling,
                seed=self._turn_seed(segment),
            )
        if completion.finish_reason == "abort":
            raise EngineError("the engine aborted the turn")
        message = segment.chat.parse(completion.token_ids.tolist(), stopped=completion.finish_reason == "stop")
        segment.append(completion, message, seconds=time.perf_counter() - start)
        if completion.finish_reason == "length":
            return StopReason.CONTEXT if segment.room == 0 else StopReason.LENGTH
        return completion, message

    def _extend(self, completion: Completion, message: Message, new: list[Message]) -> tuple[str, bool] | None:
        """Append what the template puts behind the turn, in this segment or, if rewritten, in a new one."""
        with boundary(EnvError, f"{self.cls.__name__}: the messages of step"):
            delta = self.segment.chat.extend(completion.token_ids.tolist(), message, new)
        if delta is None:
            self.metrics["rerenders"] = self.metrics.get("rerenders", 0) + 1
            self._open("rerender", self.segment.chat)
            return (StopReason.CONTEXT, False) if self.segment.room <= 0 else None
        return None if self.segment.extend(delta) else (StopReason.CONTEXT, False)

    async def _compact(self, completion: Completion, message: Message, new: list[Message]) -> tuple[str, bool] | None:
        """Let the model summarise, then go on from the first prompt and its summary."""
        assert self.cls.context is not None
        instruction = Message(role="user", content=self.cls.context.instruction)
        ended = self._extend(completion, message, [*new, instruction])
        if ended is not None:
            return ended
        sampled = await self._sample()
        if isinstance(sampled, StopReason):
            return sampled, False
        self.metrics["compactions"] = self.metrics.get("compactions", 0) + 1
        chat = self.segment.chat
        self._open("compaction", Chat(chat.tokenizer, chat.tools, compacted(self.first, sampled[1]["content"])))
        return None

    def _open(self, kind: SegmentKind, chat: Chat) -> None:
        index = len(self.segments)
        segment = OpenSegment(
            index=index,
            parent=index - 1 if index else None,
            kind=kind,
            chat=chat,
            context_tokens=self.context_tokens,
        )
        segment.extend(chat.prompt_ids())
        self.segments.append(segment)

    def _credit(self, reward: float, rewards: dict[str, float]) -> None:
        self.reward += reward + sum(rewards.values())
        if not math.isfinite(self.reward):
            raise EnvError(f"{self.cls.__name__}: the reward is {self.reward}, {rewards}")
        self.rewards |= rewards

    def _session(self, segment: OpenSegment) -> str:
        return f"{self.rollout_id}/{segment.index}"

    def _turn_seed(self, segment: OpenSegment) -> int:
        """A seed of this turn alone, so that its draws do not depend on any other turn or rollout."""
        name = f"{self.seed}/{self._session(segment)}/{len(segment.turns)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1

    async def _release(self) -> None:
        with boundary(EngineError, "release"):
            for segment in self.segments:
                await self.engine.release(self._session(segment))

    async def _close(self, env: Env[Any]) -> None:
        with boundary(EnvError, f"{self.cls.__name__}.close"):
            await env.close()
