"""An oracle whose tool fails."""

import agentgym as ag
from agentgym.engines.scripted import call, say
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"oracle: reward 0\.0 < 1\.0, \{'right': 0\.0\}: check what its tools returned: tool 'look'"
    r" failed: LookupError: no such file: map\.txt"
)
ORACLE = [call("look"), say("?")]


class Planted(Looking):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        raise LookupError("no such file: map.txt")
