"""A check without its await."""

import agentgym as ag
from agentgym.engines.scripted import say
from agentgym.testing import check_env


class Adder(ag.ToolEnv[ag.Task]):
    @ag.reward
    def right(self) -> float:
        return float(self.answer == "4")


TASK = ag.Task(id="t", prompt=({"role": "user", "content": "2 + 2?"},))


async def test_forgets() -> None:
    check_env(Adder, TASK, oracle=[say("5")])  # type: ignore[unused-coroutine]


async def test_awaits() -> None:
    await check_env(Adder, TASK, oracle=[say("4")])
