"""Runs the groups of one batch of tasks."""

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
    """Run `n` rollouts of each task, at most `concurrency` at once; the result contains every started rollout.

    A failed rollout is included without a reward. Cancelling this call cancels all rollouts. To start more rollouts
    than needed, or to run batch after batch, see `Scheduler`.

    Args:
        env: The env's class or registered name.
        tasks: The tasks.
        engine: The engine of the policy.
        n: Number of rollouts per task.
        sandboxes: An open sandbox pool. None opens one if the env declares a sandbox.
        concurrency: Maximum number of concurrent rollouts.
        sampling: The sampling settings; None uses the defaults.
        seed: The seed from which those of all groups are derived.
        on_rollout: A callback for each rollout that ends.
        models: Engines that the env uses by name (`Env.model`), in addition to the policy.
        branching: Settings of branches that continue from some of the rollouts' states; None runs no branches.

    Returns:
        The groups in the order of the tasks.

    Raises:
        ValueError: If `n` or `concurrency` is less than 1, or if two tasks have the same id.
        SandboxError: If all rollouts failed because no sandbox was available.
        AgentGymError: If all rollouts failed for other reasons, with the first one's error; continuing would teach
            nothing.
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
    """Run a group for each task, as `run_groups` does, but raise nothing if all rollouts failed.

    This is for a process that runs only a share of a batch: all of its rollouts may fail while others succeed.
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
