"""A tool that keeps a cancellation to itself."""

import asyncio

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"cancel: tool 'look' swallowed a cancellation: let asyncio\.CancelledError propagate"


class Planted(Looking):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        try:
            await asyncio.sleep(0)
        except BaseException:
            return "x"
        return "y"
