"""A reward that cannot do without an answer."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"hostile: for a model that gives no answer the rollout has no reward: EnvError: Planted: reward 'right' raised "
    r"AttributeError: 'NoneType' object has no attribute 'strip', at no_answer.py:15 in right: score "
)


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        return float(self.answer.strip() == self.task.answer)  # type: ignore[union-attr]
