"""A plain Env with one step that awaits nothing."""

import agentgym as ag
from agentgym.engines.scripted import say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "2 + 2?"},))
ORACLE = [say("4")]


class Sound(ag.Env[ag.Task]):
    async def step(self, action: ag.Message) -> ag.StepResult:
        return ag.StepResult([], float(action["content"] == "4"), True, False, {})
