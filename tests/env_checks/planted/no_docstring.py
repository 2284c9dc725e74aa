"""A tool without a docstring."""

import agentgym as ag
from tests.env_checks.looking import LookTask

FOUND = r"tool: tool 'look' of Blank: needs a docstring, the model reads it"


class Blank(ag.ToolEnv[LookTask]):
    @ag.tool
    async def look(self) -> str:
        return "nothing"

    @ag.reward
    async def right(self) -> float:
        return float(self.answer == self.task.answer)


Planted = Blank
