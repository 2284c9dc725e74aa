"""The groups of one batch of tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agentgym.engines.base import Engine
from agentgym.environments.env import Env, TaskT
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_tasks
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling.accounting import Groups, raise_if_all_failed, unique
from agentgym.scheduling.player import CONCURRENCY
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Rollout

__all__ = ["Groups", "play_groups", "run_groups"]


async def run_groups(
    env: str | type[Env[TaskT]],
    tasks: Sequence[TaskT],
    engine: Engine,
    *,
    n: int,
    sandboxes: SandboxPool | None = None,
    concurrency: int = CONCURRENCY,
    sampling: Sampling | None = None,
    seed: int = 0,
    on_rollout: Callable[[Rollout], None] | None = None,
    models: Mapping[str, Engine] | None = None,
    branching: BranchingConfig | None = None,
) -> Groups:
    """Play `n` rollouts of every task, at most `concurrency` at once; every one started is in the result.

    A rollout that fails is kept without a reward. Where all of them failed, AgentGymError with the first one's error is
    raised, or SandboxError where no sandbox was to be had: nothing could be learned from going on. Cancelling cancels
    them all. `models` are what the env asks by name. With `branching`, rollouts are played on from some of their
    states. Raises ValueError where `n` or `concurrency` is below 1, or two tasks have one id. For more rollouts than
    are needed, or batch after batch, see `Scheduler`.
    """
    schedule = Schedule(group_size=n, concurrency=concurrency, sampling=sampling, seed=seed, branching=branching)
    groups = await play_groups(env, tasks, engine, schedule, sandboxes=sandboxes, on_rollout=on_rollout, models=models)
    raise_if_all_failed(groups)
    return groups


async def play_groups(
    env: str | type[Env[TaskT]],
    tasks: Sequence[TaskT],
    engine: Engine,
    schedule: Schedule,
    *,
    sandboxes: SandboxPool | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
    models: Mapping[str, Engine] | None = None,
) -> Groups:
    """Play a group of each task, as `run_groups` does; where all rollouts failed, raise nothing.

    One process's share of a batch may fail altogether.
    """
    tasks = as_tasks(find_env(env), tasks)
    unique([task.id for task in tasks])
    at_once = min(schedule.concurrency or CONCURRENCY, max(1, schedule.group_size * len(tasks)))
    schedule = replace(schedule, concurrency=at_once)
    scheduler = Scheduler(env, tasks, engine, schedule, sandboxes=sandboxes, on_rollout=on_rollout, models=models)
    if not tasks:
        return Groups([])
    async with scheduler:
        return await scheduler.collect(len(tasks))
