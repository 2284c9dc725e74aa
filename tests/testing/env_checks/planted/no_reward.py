"""A class without a reward."""

import agentgym as ag
from tests.testing.env_checks.looking import LookTask

FOUND = r"reward: Planted has no @ag\.reward method: put @ag\.reward on the method that scores"


class Planted(ag.ToolEnv[LookTask]):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "nothing"
