"""A reward that pays for doing nothing."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"no-op: reward 1\.0 >= 1\.0, \{'right': 1\.0\}: doing nothing must earn less .*idle_is_right=True"


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        return 1.0
