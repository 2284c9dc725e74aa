"""A blocking call in an async tool."""

import time

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"blocks: tool 'look' blocked the event loop for \d\.\d s at blocking_tool\.py:\d+"
    r" `time\.sleep\(1\.5\).*`: .*to_thread"
)


class Planted(Looking):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        time.sleep(1.5)  # noqa: ASYNC251
        return "nothing"
