"""A reward that is nan for a model that does nothing."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"reward: reward 'right' returned nan"


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        return 1.0 if self.answer == self.task.answer else float("nan")
