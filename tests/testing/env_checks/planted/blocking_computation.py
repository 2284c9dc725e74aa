"""Python code that computes for a long time in an async tool."""

import time

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"blocks: tool 'look' blocked the event loop"


class Planted(Looking):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            self.metrics["rounds"] = self.metrics.get("rounds", 0) + 1
        return "nothing"
