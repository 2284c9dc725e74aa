"""A reward that is inf."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"reward: reward 'right' returned inf: return a finite number"


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        return float("inf") if self.answer == self.task.answer else 0.0
