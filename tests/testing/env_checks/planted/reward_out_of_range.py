"""A reward above the range that its author names."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"reward: 7\.0 is not within reward_range 0\.0\.\.1\.0"
OPTIONS = {"reward_range": (0.0, 1.0)}


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        return 7 * float(self.answer == self.task.answer)
