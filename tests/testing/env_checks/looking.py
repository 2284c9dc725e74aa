"""A sound env with one tool and one reward; each planted env is this one with a single mistake."""

import agentgym as ag
from agentgym.engines.scripted import Reply, call, say


class LookTask(ag.Task):
    """A question whose answer the reward knows."""

    answer: str = "42"


TASK = LookTask(id="t", prompt=(ag.Message(role="user", content="What is it?"),))
ORACLE: list[Reply] = [call("look"), say("42")]


class Looking(ag.ToolEnv[LookTask]):
    """Look, then answer."""

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "nothing"

    @ag.reward
    async def right(self) -> float:
        return float(self.answer == self.task.answer)
