"""Rollouts: one attempt at a task by one env and one engine."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from itertools import count

from agentgym.engines.base import Engine, check_engine
from agentgym.environments.env import Env, TaskT
from agentgym.environments.mixture import member_of
from agentgym.environments.registry import find_env
from agentgym.environments.resources import open_resources, opens_resources
from agentgym.environments.task_rows import as_task
from agentgym.environments.task_sandboxes import check_sandboxes, declares_sandboxes, open_sandboxes
from agentgym.judges.model_roles import check_models
from agentgym.rollouts.attempt import Attempt
from agentgym.rollouts.branches.play import Branches, check_branching
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Rollout

_BY_DEFAULT = Sampling()
observers: list[Callable[[Rollout], object]] = []
"""Functions that are called with each rollout that `rollout` returns, for tools such as the pytest plugin."""


async def rollout(
    env: str | type[Env[TaskT]],
    task: TaskT,
    engine: Engine,
    *,
    sandboxes: SandboxPool | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    rollout_id: str | None = None,
    models: Mapping[str, Engine] | None = None,
    branching: BranchingConfig | None = None,
) -> Rollout:
    """Run one attempt at a task; if the env, the sandbox or the engine fails, the Rollout has no reward.

    The same seed, weights and tool answers give the same tokens. Cancelling the call closes the env and returns the
    sandbox. If the engine, the machine or the sandbox fails before an action has reached the env, the attempt is
    repeated from scratch, up to `limits.retries` times.

    Args:
        env: The env's class or registered name.
        task: The task.
        engine: The engine of the policy.
        sandboxes: An open sandbox pool. None opens a sandbox for this rollout alone if the env declares one.
        sampling: The sampling settings; None uses the defaults.
        seed: The seed of all samples; the env's own seed is derived from it and the task.
        rollout_id: The rollout's id; None uses the task's id and "/0".
        models: Engines that the env uses by name (`Env.model`), in addition to the policy.
        branching: Settings of branches that continue from some of the rollout's states; the rollout itself is the
            same with or without them. None runs no branches.

    Returns:
        The finished rollout.

    Raises:
        EnvError: If the env's resources can't be opened or closed.
        SandboxError: If no sandbox pool can be opened for an env that declares a sandbox.
        ValueError: If this env's rollouts can't have these branches.
        TypeError: If `engine` or one of `models` isn't an engine, or `sandboxes` isn't an open sandbox pool.
    """
    check_engine(engine)
    named = check_models(models)
    check_sandboxes(sandboxes)
    cls = find_env(env)
    task = as_task(cls, task)
    cls = member_of(cls, task)
    check_branching(cls, branching)

    def new() -> Attempt:
        return Attempt(cls, task, engine, named, sampling or _BY_DEFAULT, seed, rollout_id or f"{task.id}/0")

    own_sandboxes = sandboxes is None and declares_sandboxes(cls)
    if not own_sandboxes and not opens_resources(cls):
        played = await _played(new, sandboxes, branching)
    else:
        async with AsyncExitStack() as stack:
            if own_sandboxes:
                sandboxes = await stack.enter_async_context(open_sandboxes(cls, 1))
            await stack.enter_async_context(open_resources(cls))
            played = await _played(new, sandboxes, branching)
    for observe in observers:
        observe(played)
    return played


async def _played(
    new: Callable[[], Attempt], sandboxes: SandboxPool | None, branching: BranchingConfig | None
) -> Rollout:
    """Run new attempts until one shouldn't be retried, and return its rollout."""
    for retry in count():
        # A retry reuses nothing of the failed attempt: not its env, sandbox, ids or counts.
        attempt = new()
        attempt.retries = retry
        branches = None if branching is None else Branches(attempt, branching)
        attempt.at_state = None if branches is None else branches.play
        await attempt.run(sandboxes)
        if not attempt.may_be_retried or retry == attempt.cls.limits.retries:
            break
    played = attempt.rollout()
    return played if branches is None else branches.added(played)
