"""A judge that never returns the same number twice."""

import random

import agentgym as ag
from agentgym.engines.scripted import say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "Write a poem."},))
ORACLE = [say("Roses are red.")]
OPTIONS = {"repeatable": False, "threshold": 0.5}


class Sound(ag.ToolEnv[ag.Task]):
    @ag.reward
    async def liked(self) -> float:
        return float("Roses" in (self.answer or "")) * (0.5 + random.random() / 2)
