"""Runs single rollouts through the engine's gate, with limited concurrency."""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Generic, Self

from agentgym.engines.base import Engine
from agentgym.environments.env import Env, TaskT
from agentgym.environments.resources import open_resources
from agentgym.environments.task_sandboxes import check_sandboxes, open_sandboxes
from agentgym.judges.model_roles import check_models
from agentgym.rollouts.rollout import rollout
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling.gate import EngineGate, RolloutUsage, current_usage
from agentgym.scheduling.group_state import GroupState, attempt_seed
from agentgym.scheduling.schedule import Schedule
from agentgym.types.rollout import Rollout

CONCURRENCY = 64
"""Default number of concurrent rollouts."""
_AT_ONCE = 32
"""Maximum number of rollouts that start in one pass of the event loop."""


class _Starts:
    """Lets a few rollouts start in each pass of the event loop, in order.

    Starting several thousand in one pass would block everything else for seconds.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait until the next rollout may start."""
        if self._begun < _AT_ONCE and not self._waiting:
            self._begin()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._begun += 1

    def _next_pass(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < _AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # It has not been cancelled.
                self._begin()
                turn.set_result(None)


class Player(Generic[TaskT]):
    """Runs rollouts of one env, at most `schedule.concurrency` at once; the others wait until one has ended.

    Use it in an `async with` block, which opens the env's resources, and the env's sandboxes if no pool is given.
    """

    def __init__(
        self,
        env: type[Env[TaskT]],
        gate: EngineGate,
        sandboxes: SandboxPool | None,
        schedule: Schedule,
        models: Mapping[str, Engine] | None = None,
    ) -> None:
        check_sandboxes(sandboxes)
        named = check_models(models).items()
        self.models = {name: gate if engine is gate.engine else engine for name, engine in named}
        """The models that the env queries by name; if one of them is the policy, its requests also wait at the gate."""
        self._env, self._gate, self._sandboxes, self._schedule = env, gate, sandboxes, schedule
        self._at_once = schedule.concurrency or CONCURRENCY
        self._slots, self._starts = asyncio.Semaphore(self._at_once), _Starts()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._sandboxes is None:
            opened = open_sandboxes(self._env, self._at_once)
            self._sandboxes = await self._stack.enter_async_context(opened)
        await self._stack.enter_async_context(open_resources(self._env))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def play(self, group: GroupState[TaskT], index: int, usage: RolloutUsage) -> Rollout:
        """Run one rollout of the group when a slot is free; `usage` is updated meanwhile."""
        current_usage.set(usage)
        async with self._slots:
            await self._starts.wait()
            usage.began = asyncio.get_running_loop().time()
            name, schedule = group.name(index), self._schedule
            return await rollout(
                self._env,
                group.task,
                self._gate,
                sandboxes=self._sandboxes,
                sampling=schedule.sampling,
                seed=group.seed if schedule.same_instance else attempt_seed(schedule.seed, name),
                rollout_id=name,
                models=self.models,
                branching=schedule.branching,
            )
