"""Group rewards, which an env adds when it has seen all rollouts of a task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from agentgym.engines.base import Engine
from agentgym.environments.env import Env, TaskT, has_group_reward
from agentgym.environments.mixture import member_of
from agentgym.environments.rewards import counted_content
from agentgym.errors import AgentGymError, EngineError, EnvError, Failure
from agentgym.judges.model_roles import ModelRoles
from agentgym.rollouts.at_exit import at_exit, within_limit
from agentgym.seeds import seed_for
from agentgym.types.rollout import Rollout, StopReason

NAME = "group_reward"
"""The group reward's name among a rollout's rewards."""


class GroupRewards(Generic[TaskT]):
    """Computes an env's group rewards for its tasks, if it has any."""

    def __init__(self, env: type[Env[TaskT]], models: Mapping[str, Engine]) -> None:
        self._env, self._models = env, models

    def has(self, task: TaskT) -> bool:
        """Return whether the env of this task defines group rewards."""
        return has_group_reward(member_of(self._env, task))

    async def added(self, task: TaskT, rollouts: Sequence[Rollout], *, seed: int) -> list[Rollout]:
        """Return a task's scored rollouts with their group rewards added.

        If computing the group rewards fails because of content from the policy, they are all 0.0. If it fails for
        another reason, all of the rollouts are returned as failed ones. The usage of models is added to the rollouts'
        metrics, an equal share to each.
        """
        cls = member_of(self._env, task)
        where, metrics = f"{cls.__name__}.{NAME}", dict[str, float]()
        session, own = f"{task.id}/{NAME}", seed_for("group reward", seed, task.id)
        models = ModelRoles(self._models, cls.fallback_models, owner=where, session=session, seed=own, metrics=metrics)
        try:
            async with at_exit(EngineError, "release", models.release):
                try:
                    reward = partial(cls.group_reward, task, tuple(rollouts), models)
                    values = await within_limit(where, cls.limits.seconds, reward)
                except EnvError as error:
                    if not (counted := counted_content(error, where, cls.group_reward)):
                        raise
                    values, metrics[counted] = [0.0] * len(rollouts), 1.0
                rewards = _read(values, len(rollouts), where)
        except AgentGymError as error:
            failed = Failure.of(error)
            return [
                replace(r, reward=None, failure=failed, stop_reason=StopReason.ERROR)
                for r in _counted(rollouts, metrics)
            ]
        return [
            replace(r, reward=(r.reward or 0.0) + value, rewards={**r.rewards, NAME: value})
            for r, value in zip(_counted(rollouts, metrics), rewards, strict=True)
        ]


def _counted(rollouts: Sequence[Rollout], metrics: Mapping[str, float]) -> list[Rollout]:
    """Return the rollouts with an equal share of these metrics added to theirs."""
    shares = {name: value / len(rollouts) for name, value in metrics.items()}
    added = [{name: r.metrics.get(name, 0.0) + share for name, share in shares.items()} for r in rollouts]
    return [replace(r, metrics={**r.metrics, **more}) for r, more in zip(rollouts, added, strict=True)]


def _read(values: Any, count: int, where: str) -> list[float]:
    """Return the group rewards as floats; raise EnvError unless they are `count` finite numbers.

    `where` is the name of the env's method, with which the message begins.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or len(values) != count:
        raise EnvError(f"{where}: must return a number for each of its {count} rollouts, got {values!r:.200}")
    if any(isinstance(value, str | bytes) for value in values):
        raise EnvError(f"{where}: must return numbers, got {values!r:.200}")
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise EnvError(f"{where}: must return numbers, got {values!r:.200}") from error
    if not all(map(math.isfinite, numbers)):
        raise EnvError(f"{where}: must return finite numbers, got {numbers}")
    return numbers
