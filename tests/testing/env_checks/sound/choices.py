"""A prompt that is created in reset and shows the answer among the choices, and a tool that looks it up."""

from typing import Any

import agentgym as ag
from agentgym.engines.scripted import call, say


class Choice(ag.Task):
    """A question with choices."""

    answer: str
    others: tuple[str, ...]


TASK = Choice(id="t", prompt=({"role": "user", "content": "Which city?"},), answer="Paris", others=("London", "Rome"))
ORACLE = [call("look_up", what="Seine"), say("Paris")]


class Sound(ag.ToolEnv[Choice]):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[ag.Message], dict[str, Any]]:
        prompt, info = await super().reset(seed=seed)
        choices = ", ".join(sorted([self.task.answer, *self.task.others]))
        return [*prompt, ag.Message(role="user", content=f"Choose one of {choices}.")], info

    @ag.tool
    async def look_up(self, what: str) -> str:
        """Look something up."""
        if what != "Seine":
            raise ag.ToolError(f"nothing is known of {what}")
        return "The Seine flows through Paris."

    @ag.reward
    async def right(self) -> float:
        return float(self.answer == self.task.answer)
