"""A reward that uses up what it looks at, and raises when it is asked for again."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking, LookTask

FOUND = r"reward: scored twice, the second time raised EnvError: Planted: reward 'right' raised IndexError: .*: make"


class Planted(Looking):
    def __init__(self, task: LookTask) -> None:
        super().__init__(task)
        self.answers = [task.answer]

    @ag.reward
    async def right(self) -> float:
        return float(self.answer == self.answers.pop())
