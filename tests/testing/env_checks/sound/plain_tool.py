"""A plain tool, which runs in a thread and takes some time."""

import time

import agentgym as ag
from agentgym.engines.scripted import call, say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "Look."},))
ORACLE = [call("look"), call("look"), say("seen")]


class Sound(ag.ToolEnv[ag.Task]):
    looks = 0

    @ag.tool
    def look(self) -> str:
        """Look closely."""
        time.sleep(0.7)
        self.looks += 1
        return "seen"

    @ag.reward
    def looked(self) -> float:
        return float(self.looks == 2)
