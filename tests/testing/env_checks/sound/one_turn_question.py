"""A question that is answered in one turn, with a plain reward."""

import agentgym as ag
from agentgym.engines.scripted import say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "2 + 2?"},))
ORACLE = [say("4")]


class Sound(ag.ToolEnv[ag.Task]):
    limits = ag.Limits(turns=1)

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "4")
