"""A blocking call in an async reward."""

import time

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"blocks: reward 'right' blocked the event loop for \d\.\d s at blocking_reward\.py:\d+ `time\.sleep"


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        self._judge()
        return float(self.answer == self.task.answer)

    def _judge(self) -> None:
        time.sleep(1.5)
