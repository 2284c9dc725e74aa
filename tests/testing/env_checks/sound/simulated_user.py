"""A simulated user who writes plain text, and leaves when the request is fulfilled."""

import agentgym as ag
from agentgym.engines.scripted import call, say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "I want to change my order."},))
ORACLE = [say("Which one?"), call("change", order=7), say("It is changed.")]


class Sound(ag.ToolEnv[ag.Task]):
    changed = 0

    @ag.tool
    async def change(self, order: int) -> str:
        """Change an order."""
        self.changed = order
        return "changed"

    async def step(self, action: ag.Message) -> ag.StepResult:
        if action.get("tool_calls") or self.changed:
            return await super().step(action)
        return ag.StepResult([ag.Message(role="user", content="Number 7.")], 0.0, False, False, {})

    @ag.reward
    async def right(self) -> float:
        return float(self.changed == 7)
