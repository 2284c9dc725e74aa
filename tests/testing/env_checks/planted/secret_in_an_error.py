"""A hidden field of the task in the text of an exception."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"secret: the task's 'answer' \('42'\) is in a result of tool 'look', which the model reads"


class Planted(Looking):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        raise KeyError(self.task.answer)
