"""A secret that a tool shows."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"secret: a text of secrets=\[\.\.\.\] \('42'\) is in a result of tool 'look', which the model"
    r" reads: keep it out"
)
OPTIONS = {"secrets": ["42"]}


class Planted(Looking):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        return f"the key is not shown ({self.task.answer})"
