"""A tool whose answer is drawn without the seed."""

import random

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"seed: tool 'look' gave different results for the same call with the same seed .*random\.Random\(seed\)"


class Planted(Looking):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        return str(random.random())
