"""A reward that is a text."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"reward: reward 'right' returned '1\.0': return a finite number"


class Planted(Looking):
    @ag.reward
    async def right(self) -> str:  # type: ignore[override]
        return "1.0" if self.answer == self.task.answer else "0.0"
