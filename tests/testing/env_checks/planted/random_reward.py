"""A reward that is drawn without the seed."""

import random

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"reward: reward 'right' was 1\.\d+ and then 1\.\d+ for the same actions with the same seed:"
    r" .*random\.Random\(seed\)"
)


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        return float(self.answer == self.task.answer) * (1 + random.random())
