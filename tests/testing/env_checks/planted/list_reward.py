"""A reward that is a list."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"reward: reward 'right' returned \[1\.0\]: return a finite number"


class Planted(Looking):
    @ag.reward
    async def right(self) -> list[float]:  # type: ignore[override]
        return [float(self.answer == self.task.answer)]
