"""The groups of one batch of tasks."""

from collections.abc import Callable, Mapping, Sequence

from agentgym.engines.base import Engine
from agentgym.environments.env import Env, TaskT
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_tasks
from agentgym.sandboxes.protocol import Boxes
from agentgym.scheduling.accounting import Groups, raise_if_all_failed, unique
from agentgym.scheduling.group_state import GroupSettings
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.branching import Branching
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Rollout

__all__ = ["Groups", "play_groups", "run_groups"]


async def run_groups(
    env: str | type[Env[TaskT]],
    tasks: Sequence[TaskT],
    engine: Engine,
    *,
    n: int,
    boxes: Boxes | None = None,
    concurrency: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    on_rollout: Callable[[Rollout], None] | None = None,
    models: Mapping[str, Engine] | None = None,
    branching: Branching | None = None,
) -> Groups:
    """Play `n` rollouts of every task, at most `concurrency` at once; every one started is in the result.

    A rollout that fails is kept without a reward. Where all of them failed, AgentGymError with the first one's error is
    raised, or SandboxError where no box was to be had: nothing could be learned from going on. Cancelling cancels them
    all. `models` are what the env asks by name. With `branching`, rollouts are
    played on from some of their states. Raises ValueError where `n` or `concurrency` is below 1, or two tasks have one
    id. For more rollouts than are needed, or batch after batch, see `Scheduler`.
    """
    groups = await play_groups(
        env,
        tasks,
        engine,
        n=n,
        boxes=boxes,
        concurrency=concurrency,
        sampling=sampling,
        seed=seed,
        on_rollout=on_rollout,
        models=models,
        branching=branching,
    )
    raise_if_all_failed(groups)
    return groups


async def play_groups(
    env: str | type[Env[TaskT]],
    tasks: Sequence[TaskT],
    engine: Engine,
    *,
    n: int,
    boxes: Boxes | None = None,
    concurrency: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    same_instance: bool = True,
    on_rollout: Callable[[Rollout], None] | None = None,
    models: Mapping[str, Engine] | None = None,
    branching: Branching | None = None,
) -> Groups:
    """Do what `run_groups` does for one process's share of a batch: raise nothing where all of its rollouts failed.

    Without `same_instance` each rollout is an attempt of an evaluation, whose env gets a seed of its own.
    """
    tasks = as_tasks(find_env(env), tasks)
    unique([task.id for task in tasks])
    scheduler = Scheduler(
        env,
        tasks,
        engine,
        GroupSettings(
            n=n,
            concurrency=min(concurrency, max(1, n * len(tasks))),
            sampling=sampling,
            seed=seed,
            same_instance=same_instance,
            branching=branching,
        ),
        boxes=boxes,
        on_rollout=on_rollout,
        models=models,
    )
    if not tasks:
        return Groups([])
    async with scheduler:
        return await scheduler.collect(len(tasks))
