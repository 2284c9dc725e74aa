"""A reward that returns nothing."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"reward: reward 'right' returned None: return a finite number"


class Planted(Looking):
    @ag.reward
    async def right(self) -> None:  # type: ignore[override]
        self.metrics["right"] = float(self.answer == self.task.answer)
