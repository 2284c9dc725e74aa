"""Rollouts: one env and one engine play one attempt at a task."""

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
"""Functions that are called with each rollout that `rollout` returns; for tools that show them, as the pytest plugin
does."""


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
    """Play one attempt; what goes wrong in the env, the sandbox or the engine is a Rollout without a reward.

    Without `sandboxes`, an env that declares a sandbox gets a sandbox of its own for this rollout; SandboxError where
    none can be had at all. The same seed, weights and tool answers give the same tokens; what the env gets is derived
    from `seed` and the task. Cancelling closes the env and gives the sandbox back. A failed engine or sandbox is tried
    again, from nothing, up to `limits.retries` times, as long as no action had reached the env. `models` are what the
    env asks by name (`Env.model`), beside the policy. With `branching` it is also played on from some of its states;
    the rollout itself is what it would be without.

    :raises EnvError: where the env's resources cannot be opened or closed.
    :raises ValueError: where the env's rollouts cannot have these branches.
    :raises TypeError: where `engine` or one of `models` is no engine, or `sandboxes` no open sandboxes.
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
    """Play new attempts until one is not to be tried again; the rollout of that one."""
    for retry in count():
        # Nothing of a failed attempt goes into the next: not its env, its sandbox, its ids or its counts.
        attempt = new()
        attempt.retries = retry
        branches = None if branching is None else Branches(attempt, branching)
        attempt.at_state = None if branches is None else branches.play
        await attempt.run(sandboxes)
        if not attempt.may_be_retried or retry == attempt.cls.limits.retries:
            break
    played = attempt.rollout()
    return played if branches is None else branches.added(played)
