"""A reward that comes out differently when it is asked for again."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"reward: scored twice, 'right' was 1\.0 and then 0\.5: make the reward leave the state that it reads unchanged"


class Planted(Looking):
    asked = 0

    @ag.reward
    async def right(self) -> float:
        self.asked += 1
        return float(self.answer == self.task.answer) / self.asked
