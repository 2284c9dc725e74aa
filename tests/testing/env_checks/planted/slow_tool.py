"""A tool that takes longer than its limit where the oracle needs it."""

import asyncio

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"timeout: tool 'look' took longer than its limit of 0\.05 s in the oracle's rollout: raise its timeout_s"


class Planted(Looking):
    @ag.tool(timeout_s=0.05)
    async def look(self) -> str:
        """Look."""
        await asyncio.Event().wait()
        return "nothing"
