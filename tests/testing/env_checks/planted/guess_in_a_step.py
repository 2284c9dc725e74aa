"""A step that takes what the model says for a number."""

from typing import Any

import agentgym as ag
from agentgym.engines.scripted import Reply, say
from tests.testing.env_checks import looking

FOUND = (
    r"hostile: for a model that says a number of 5,000 digits the rollout has no reward: EnvError: Planted.step: "
    r"ValueError: Exceeds the limit .*, at guess_in_a_step.py:19 in step: score "
)
ORACLE: list[Reply] = [say("42")]


class Planted(ag.Env[looking.LookTask]):
    async def step(self, action: ag.Message) -> ag.StepResult:
        text = action["content"]
        guess = int(text) if text.isdecimal() else None
        return ag.StepResult([], float(guess == int(self.task.answer)), True, False, {})

    @property
    def tools(self) -> list[dict[str, Any]]:
        return []
