"""A reward that computes with a number of any size, which a tool was given."""

import agentgym as ag
from agentgym.engines.scripted import Reply, call, say
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"hostile: for a model that calls 'guess' with numbers of 900 digits the rollout has no reward: EnvError: Planted: "
    r"reward 'right' raised OverflowError: int too large to convert to float, at guess_in_a_tool.py:25 in right: score"
)
ORACLE: list[Reply] = [call("guess", number=42), say("done")]


class Planted(Looking):
    guessed = 0

    @ag.tool
    async def guess(self, number: int) -> str:
        """Guess the number."""
        self.guessed = number
        return "noted"

    @ag.reward
    async def right(self) -> float:
        return 1.0 / (1.0 + abs(float(self.guessed) - int(self.task.answer)))
