"""A group reward that takes each answer for a number."""

from collections.abc import Callable, Sequence
from typing import Any

import agentgym as ag
from tests.testing.env_checks.looking import Looking, LookTask

FOUND = (
    r"hostile: for a group of such answers \(and for \d+ more\) the rollout has no reward: EnvError: "
    r"Planted.group_reward: ValueError: .*, at group_of_answers.py:20 in (<listcomp>|group_reward): score "
)


class Planted(Looking):
    @classmethod
    async def group_reward(
        cls, task: LookTask, rollouts: Sequence[ag.Rollout], model: Callable[[str], Any]
    ) -> Sequence[float]:
        return [float(rollout.messages[-1]["content"]) for rollout in rollouts]
