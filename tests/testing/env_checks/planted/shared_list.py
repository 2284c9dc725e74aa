"""A list that all rollouts share."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"shared: Planted\.seen is a class attribute, .* and a rollout changed it: create it in"
    r" __init__ \(self\.seen = \.\.\.\)"
)


class Planted(Looking):
    seen: list[int] = []  # noqa: RUF012

    @ag.tool
    async def look(self) -> str:
        """Look."""
        self.seen.append(1)
        return "nothing"
